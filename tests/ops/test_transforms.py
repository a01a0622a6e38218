"""The op under autocast, and in torch's function transforms: grad, vmap, jacobians, checkpointing, meta tensors."""

from __future__ import annotations

import pytest
import torch
from helpers import random_inputs, with_gradients

from flowformer import flow_attention, flow_attention_recurrent, flow_attention_varlen

BACKENDS = pytest.mark.parametrize("backend", ["torch", "reference"])
KINDS = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])


def close(value, truth, tolerance=1e-12):
    torch.testing.assert_close(value, truth, rtol=tolerance, atol=tolerance)


class Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@KINDS
class TestAutocast:
    @BACKENDS
    def test_takes_what_it_is_given(self, is_causal, backend):
        """Inputs of float32 stay float32 to the last digit: autocast rounds projections, not flows."""
        inputs = random_inputs(dtype=torch.float32)

        def attend(*x):
            return flow_attention(*x, is_causal=is_causal, backend=backend)

        def under_autocast(*x):
            with torch.autocast("cpu", torch.bfloat16):
                return attend(*x)

        for value, truth in zip(with_gradients(under_autocast, inputs), with_gradients(attend, inputs), strict=True):
            assert value.dtype == torch.float32
            assert torch.equal(value, truth)

    def test_backward_under_autocast(self, is_causal):
        leaves = [x.requires_grad_() for x in random_inputs(dtype=torch.float32)]
        result = flow_attention(*leaves, is_causal=is_causal, backend="torch").square().sum()
        truth = torch.autograd.grad(result, leaves, retain_graph=True)
        with torch.autocast("cpu", torch.bfloat16):
            grads = torch.autograd.grad(result, leaves)
        assert all(torch.equal(grad, expected) for grad, expected in zip(grads, truth, strict=True))

    @BACKENDS
    def test_mixed_inputs_are_rounded_alike(self, is_causal, backend):
        """A norm leaves float32, a projection bfloat16: what then meets is rounded, as SDPA's inputs are."""
        query, key, value = random_inputs(dtype=torch.float32)
        truth = flow_attention(*(x.bfloat16() for x in (query, key, value)), is_causal=is_causal, backend=backend)
        with torch.autocast("cpu", torch.bfloat16):
            result = flow_attention(query, key.bfloat16(), value.bfloat16(), is_causal=is_causal, backend=backend)
        assert result.dtype == torch.bfloat16
        assert torch.equal(result, truth)


@KINDS
class TestFunctionTransforms:
    def test_grad(self, is_causal):
        inputs = random_inputs()

        def loss(*x):
            return flow_attention(*x, is_causal=is_causal, backend="torch").square().sum()

        leaves = [x.clone().requires_grad_() for x in inputs]
        expected = torch.autograd.grad(loss(*leaves), leaves)
        for grad, truth in zip(torch.func.grad(loss, argnums=(0, 1, 2))(*inputs), expected, strict=True):
            close(grad, truth)

    @pytest.mark.parametrize("backend", ["torch", "reference"])
    def test_vmap_is_a_loop(self, is_causal, backend):
        query, key, value = random_inputs()
        queries, masks = torch.stack([query, 2 * query, -query], 1), torch.rand(2, 9, 3) > 0.3

        def attend(q, v, mask):
            return flow_attention(q, key, v, is_causal=is_causal, query_mask=mask, key_mask=mask, backend=backend)

        values = torch.stack([value, value + 1, value * 2], -1)
        found = torch.func.vmap(attend, in_dims=(1, -1, 2), out_dims=3)(queries, values, masks)
        truth = [attend(queries[:, i], values[..., i], masks[..., i]) for i in range(3)]
        close(found, torch.stack(truth, 3))
        twice = torch.func.vmap(torch.func.vmap(attend, in_dims=(0, None, None)), in_dims=(0, None, None))
        grid = torch.stack([torch.stack([query, query + 1]), torch.stack([2 * query, -query])])
        close(twice(grid, value, None)[1, 0], attend(2 * query, value, None))

    def test_gradients_of_each_sample(self, is_causal):
        inputs = random_inputs(batch=4)

        def loss(*x):
            return flow_attention(*(part[None] for part in x), is_causal=is_causal).square().sum()

        found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*inputs)
        leaves = [x.clone().requires_grad_() for x in inputs]
        # samples do not depend on one another, so the gradient of their sum has that of each
        truth = torch.autograd.grad(flow_attention(*leaves, is_causal=is_causal).square().sum(), leaves)
        for grad, expected in zip(found, truth, strict=True):
            close(grad, expected)

    def test_jacobian(self, is_causal):
        inputs = random_inputs(batch=1, heads=1, sinks=4, dim=2)

        def jacobians(backend):
            return torch.func.jacrev(
                lambda *x: flow_attention(*x, is_causal=is_causal, backend=backend), argnums=(0, 1, 2)
            )(*inputs)

        for found, truth in zip(jacobians("torch"), jacobians("reference"), strict=True):
            close(found, truth)

    @pytest.mark.parametrize("backend", [None, "torch"])
    def test_batched_gradients_are_a_loop(self, is_causal, backend):
        """As of torch.autograd.functional.jacobian(vectorize=True)."""
        leaves = [x.requires_grad_() for x in random_inputs()]
        result = flow_attention(*leaves, is_causal=is_causal, backend=backend)
        directions = torch.randn(3, *result.shape, dtype=result.dtype)
        found = torch.autograd.grad(result, leaves, directions, is_grads_batched=True, retain_graph=True)
        truth = [torch.autograd.grad(result, leaves, direction, retain_graph=True) for direction in directions]
        for grads, expected in zip(found, zip(*truth, strict=True), strict=True):
            close(grads, torch.stack(expected))

    def test_second_derivatives_under_vmap_are_refused(self, is_causal):
        inputs = random_inputs(batch=1, heads=1, sinks=4, dim=2)
        twice = torch.func.jacrev(torch.func.jacrev(lambda *x: flow_attention(*x, is_causal=is_causal).sum()))
        with pytest.raises(RuntimeError, match='differentiable once; for higher derivatives use backend="reference"'):
            twice(*inputs)

    def test_vmap_of_packed_sequences_is_a_loop(self, is_causal):
        inputs = [torch.randn(3, 9, heads, 4, dtype=torch.float64) for heads in (6, 2, 2)]
        bounds = torch.tensor([0, 4, 4, 9])

        def attend(*x):
            return flow_attention_varlen(*x, bounds, bounds, 5, 5, is_causal=is_causal, enable_gqa=True)

        close(torch.func.vmap(attend)(*inputs), torch.stack([attend(*x) for x in zip(*inputs, strict=True)]))
        grads = torch.func.vmap(torch.func.grad(lambda *x: attend(*x).square().sum(), (0, 1, 2)))(*inputs)
        leaves = [x[1].clone().requires_grad_() for x in inputs]
        for grad, truth in zip(grads, torch.autograd.grad(attend(*leaves).square().sum(), leaves), strict=True):
            close(grad[1], truth)
        with pytest.raises(NotImplementedError, match="cannot map cu_seqlens"):
            torch.func.vmap(
                lambda lengths: flow_attention_varlen(*(x[0] for x in inputs), lengths, lengths, 5, 5, enable_gqa=True)
            )(bounds.expand(2, -1))

    def test_vmap_of_new_tokens_is_a_loop(self, is_causal):
        del is_causal  # decoding is causal
        _, state = flow_attention_recurrent(*random_inputs())
        tokens = torch.stack([random_inputs(sinks=2, seed=seed)[0] for seed in range(3)])

        def attend(x):
            result, end = flow_attention_recurrent(x, x, x, state)
            return result, *end.pack()

        found = torch.func.vmap(attend)(tokens)
        truth = [attend(x) for x in tokens]
        for part, expected in zip(found, zip(*truth, strict=True), strict=True):
            close(part, torch.stack(expected))

    def test_forward_mode_is_refused_or_left_to_the_reference(self, is_causal):
        query, key, value = random_inputs()

        def push(backend):
            return torch.func.jvp(
                lambda q: flow_attention(q, key, value, is_causal=is_causal, backend=backend), (query,), (key,)
            )[1]

        with pytest.raises(NotImplementedError, match=r'has no forward mode.*use backend="reference"'):
            push("torch")
        step = 1e-6
        ahead, behind = (flow_attention(query + sign * step * key, key, value, is_causal=is_causal) for sign in (1, -1))
        close(push("reference"), (ahead - behind) / (2 * step), tolerance=1e-8)

    def test_checkpointing(self, is_causal):
        """Activation checkpointing computes the op again and gets the same bits."""
        inputs = random_inputs(dtype=torch.float32)

        def attend(*x):
            return flow_attention(*x, is_causal=is_causal, backend="torch")

        def checkpointed(*x):
            return torch.utils.checkpoint.checkpoint(attend, *x, use_reentrant=False)

        for value, truth in zip(with_gradients(checkpointed, inputs), with_gradients(attend, inputs), strict=True):
            assert torch.equal(value, truth)

    @pytest.mark.parametrize("backend", ["native", "torch", "reference"])
    def test_no_gradient_of_the_result(self, is_causal, backend):
        """Behind a function whose backward pass returns None, autograd passes None instead of zeros."""
        inputs = [x.requires_grad_() for x in random_inputs()]
        blocked = Blocked.apply(flow_attention(*inputs, is_causal=is_causal, backend=backend))
        grads = torch.autograd.grad(blocked.sum() + inputs[0].sum(), inputs, materialize_grads=True)
        assert torch.equal(grads[0], torch.ones_like(grads[0]))
        assert not grads[1].any()
        assert not grads[2].any()

    def test_meta_tensors(self, is_causal):
        """Shapes without numbers, as large models are first built."""
        query, key, value = (x.to("meta") for x in random_inputs(sinks=2000, value_dim=3))
        result = flow_attention(query, key, value, is_causal=is_causal)
        assert result.is_meta
        assert result.shape == (2, 3, 2000, 3)
