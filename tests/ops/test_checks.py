"""Every mistake is met with the right exception, which says what was passed, what is accepted, and what to do."""

from __future__ import annotations

import re

import pytest
import torch

from flowformer import (
    FlowState,
    FlowVariant,
    explain,
    flow_attention,
    flow_attention_recurrent,
    flow_attention_varlen,
    flow_maps,
)


def tokens(*shape, **options):
    return torch.zeros(*(shape or (2, 4, 5, 8)), **options)


X = tokens()
MASK = torch.ones(2, 5, dtype=torch.bool)
PACKED = tokens(7, 4, 8)
BOUNDS = torch.tensor([0, 3, 7])


def attend(query=X, key=X, value=X, **options):
    return flow_attention(query, key, value, **options)


def continued(state, query=X, **options):
    return flow_attention_recurrent(query, query, query, state, **options)


def packed(query=PACKED, key=PACKED, value=PACKED, q=BOUNDS, k=BOUNDS, longest_q=4, longest_k=4, **options):
    return flow_attention_varlen(query, key, value, q, k, longest_q, longest_k, **options)


# what is called: the call, the exception, and what its message must contain
MISTAKES = {
    # query, key and value
    "query of rank 3": (
        lambda: attend(tokens(4, 5, 8)),
        ValueError,
        "query must have 4 dimensions|(4, 5, 8)|batch, heads",
    ),
    "value of rank 5": (lambda: attend(value=X[None]), ValueError, "value must have 4 dimensions|(1, 2, 4, 5, 8)"),
    "list for a tensor": (lambda: attend([[1.0]]), TypeError, "query must be a tensor|list"),
    "None for a tensor": (lambda: attend(value=None), TypeError, "value must be a tensor|NoneType"),
    "other batch": (lambda: attend(tokens(3, 4, 5, 8)), ValueError, "same batch size|(3, 4, 5, 8)|(2, 4, 5, 8)"),
    "other batch of values": (lambda: attend(value=X[:1]), ValueError, "same batch size|(1, 4, 5, 8)"),
    "other key heads": (
        lambda: attend(key=X[:, :2], value=X[:, :2]),
        ValueError,
        "number of heads|(2, 2, 5, 8)|enable_gqa=True",
    ),
    "other value heads": (lambda: attend(value=X[:, :2]), ValueError, "key and value|number of heads|(2, 2, 5, 8)"),
    "heads that do not divide": (
        lambda: attend(key=X[:, :3], value=X[:, :3], enable_gqa=True),
        ValueError,
        "must divide|(2, 3, 5, 8)|(2, 4, 5, 8)",
    ),
    "more key heads than query heads": (
        lambda: attend(X[:, :2], enable_gqa=True),
        ValueError,
        "must divide|(2, 2, 5, 8)|(2, 4, 5, 8)",
    ),
    "other head dim": (lambda: attend(key=X[..., :6]), ValueError, "same head dimension|(2, 4, 5, 6)|(2, 4, 5, 8)"),
    "head dim 0": (
        lambda: attend(X[..., :0], X[..., :0]),
        ValueError,
        "head dimension must be at least 1|(2, 4, 5, 0)",
    ),
    "other value length": (lambda: attend(value=X[:, :, :3]), ValueError, "same length|(2, 4, 3, 8)|(2, 4, 5, 8)"),
    "integers": (
        lambda: attend(X.long(), X.long(), X.long()),
        TypeError,
        "float64, float32, bfloat16 or float16|int64",
    ),
    "complex": (lambda: attend(X.cfloat(), X.cfloat(), X.cfloat()), TypeError, "float64, float32|complex64"),
    "float8": (lambda: attend(*[X.to(torch.float8_e4m3fn)] * 3), TypeError, "float64, float32|float8_e4m3fn"),
    "mixed dtypes": (lambda: attend(X.half()), TypeError, "one dtype|query torch.float16|key torch.float32"),
    "mixed devices": (lambda: attend(X.to("meta")), ValueError, "one device|query on meta|key on cpu"),
    "causal with other lengths": (
        lambda: attend(X[:, :, :3], is_causal=True),
        ValueError,
        "as many queries as keys|3 queries and 5 keys|flow_attention_recurrent|is_causal=False",
    ),
    # masks
    "mask of a batch too many": (
        lambda: attend(key_mask=MASK[:1]),
        ValueError,
        "key_mask|(batch, length) = (2, 5)|(1, 5)",
    ),
    "mask too short": (lambda: attend(query_mask=MASK[:, :4]), ValueError, "query_mask|(2, 5)|(2, 4)"),
    "mask of one sequence": (lambda: attend(key_mask=MASK[0]), ValueError, "key_mask|(2, 5)|got (5,)"),
    "mask of queries by keys": (
        lambda: attend(key_mask=torch.ones(5, 5).bool()),
        ValueError,
        "key_mask|(5, 5)|no linear form|is_causal=True",
    ),
    "mask of heads, queries by keys": (
        lambda: attend(query_mask=torch.ones(2, 1, 5, 5).bool()),
        ValueError,
        "query_mask|(2, 1, 5, 5)|no linear form",
    ),
    "float mask": (lambda: attend(key_mask=MASK.float()), TypeError, "key_mask must be bool|torch.float32|mask.bool()"),
    "integer mask": (
        lambda: attend(key_mask=MASK.long()),
        TypeError,
        "key_mask must be bool|torch.int64|True = takes part",
    ),
    "list for a mask": (lambda: attend(key_mask=[[True] * 5] * 2), TypeError, "key_mask must be a bool tensor|list"),
    "mask elsewhere": (lambda: attend(key_mask=MASK.to("meta")), ValueError, "key_mask is on meta|tokens are on cpu"),
    "recurrent mask of the past": (
        lambda: continued(None, key_mask=torch.ones(2, 9).bool()),
        ValueError,
        "key_mask|(2, 5)|(2, 9)",
    ),
    # options
    "tensor scale": (lambda: attend(scale=torch.tensor(0.5)), TypeError, "scale must be a number or None|Tensor"),
    "text scale": (lambda: attend(scale="1"), TypeError, "scale must be a number or None|str"),
    "infinite scale": (lambda: attend(scale=float("inf")), ValueError, "scale must be finite|inf"),
    "unknown variant": (
        lambda: attend(variant="visoin"),
        ValueError,
        "unknown variant 'visoin'|did you mean 'vision'|accepted: paper, core",
    ),
    "variant unlike any": (lambda: attend(variant="xyz"), ValueError, "unknown variant 'xyz'|accepted: paper, core"),
    "dict for a variant": (lambda: attend(variant={"clamp": 1}), TypeError, "variant must be a FlowVariant|dict"),
    "unknown backend": (
        lambda: attend(backend="torhc"),
        ValueError,
        "unknown backend 'torhc'|did you mean 'torch'|'reference'",
    ),
    "backend unlike any": (lambda: attend(backend="xyz"), ValueError, "unknown backend 'xyz'|'torch'|'reference'"),
    "unknown feature map": (
        lambda: FlowVariant(feature_map="sigmiod"),
        ValueError,
        "unknown feature_map 'sigmiod'|did you mean 'sigmoid'|accepted: sigmoid, elu+1, relu",
    ),
    "unknown competition": (
        lambda: FlowVariant(competition="softmin"),
        ValueError,
        "unknown competition 'softmin'|did you mean 'softmax'|accepted: softmax, sigmoid, none",
    ),
    "unknown allocation": (
        lambda: FlowVariant(allocation=None),
        ValueError,
        "unknown allocation None|accepted: sigmoid, softmax, none",
    ),
    "clamp 0": (lambda: FlowVariant(clamp=0.0), ValueError, "clamp must be positive, or None|0.0"),
    "negative clamp": (lambda: FlowVariant(clamp=-1.0), ValueError, "clamp must be positive|-1.0"),
    "NaN clamp": (lambda: FlowVariant(clamp=float("nan")), ValueError, "clamp must be positive|nan"),
    "eps 0": (lambda: FlowVariant(eps=0.0), ValueError, "eps must be positive|0.0"),
    "negative eps": (lambda: FlowVariant(eps=-1e-6), ValueError, "eps must be positive|-1e-06"),
    "negative flow_eps": (lambda: FlowVariant(flow_eps=-1e-6), ValueError, "flow_eps must not be negative|-1e-06"),
    # states
    "state of another batch": (
        lambda: continued(FlowState.empty(3, 4, 8)),
        ValueError,
        "(3, 4, 8, 8)|(2, 4, 8, 8)|FlowState.select",
    ),
    "state of other heads": (
        lambda: continued(FlowState.empty(2, 2, 8)),
        ValueError,
        "(2, 2, 8, 8)|(2, 4, 8, 8)|query heads",
    ),
    "state of another head dim": (lambda: continued(FlowState.empty(2, 4, 6)), ValueError, "(2, 4, 6, 6)|(2, 4, 8, 8)"),
    "state of another value dim": (
        lambda: continued(FlowState.empty(2, 4, 8, 3)),
        ValueError,
        "(2, 4, 8, 3)|(2, 4, 8, 8)",
    ),
    "parts of two states": (
        lambda: continued(FlowState(FlowState.empty(3, 4, 8).sums, *FlowState.empty(2, 4, 8).pack()[1:])),
        ValueError,
        "do not belong together|(3, 4, 4, 8)|(2, 4, 4, 8)",
    ),
    "state of another dtype": (
        lambda: continued(FlowState.empty(2, 4, 8, dtype=torch.float64)),
        TypeError,
        "kept in torch.float32|torch.float64|state.to(dtype",
    ),
    "state elsewhere": (
        lambda: continued(FlowState.empty(2, 4, 8, device="meta")),
        ValueError,
        "the state is on meta|tokens are on cpu|state.to(device)",
    ),
    "tensors for a state": (
        lambda: continued(FlowState.empty(2, 4, 8).pack()),
        TypeError,
        "state must be a FlowState|tuple|FlowState.unpack",
    ),
    "recurrent with other lengths": (
        lambda: flow_attention_recurrent(X[:, :, :1], X, X),
        ValueError,
        "as many queries as keys|1 queries and 5 keys",
    ),
    "half state": (
        lambda: FlowState.empty(1, 1, 1, dtype=torch.float16),
        TypeError,
        "torch.float32 or torch.float64|float16",
    ),
    "state to half": (
        lambda: FlowState.empty(1, 1, 1).to(dtype=torch.bfloat16),
        TypeError,
        "torch.float32 or torch.float64|bfloat16",
    ),
    "select by bool": (
        lambda: FlowState.empty(2, 1, 1).select(torch.tensor([True, False])),
        TypeError,
        "integer row indices|torch.bool|(2,)",
    ),
    "select by a matrix": (
        lambda: FlowState.empty(2, 1, 1).select(torch.zeros(1, 2).long()),
        TypeError,
        "1-d tensor of integer|(1, 2)",
    ),
    "select by a list": (lambda: FlowState.empty(2, 1, 1).select([0, 1]), TypeError, "1-d tensor of integer|got list"),
    "zero rows by a list": (
        lambda: FlowState.empty(2, 1, 1).zero_rows([True, False]),
        TypeError,
        "bool tensor of shape (2,)|got list",
    ),
    "zero rows by index": (
        lambda: FlowState.empty(2, 1, 1).zero_rows(torch.tensor([1])),
        TypeError,
        "bool tensor of shape (2,)|torch.int64|(1,)",
    ),
    # packed sequences
    "packed of rank 4": (
        lambda: packed(PACKED[None]),
        ValueError,
        "query must have 3 dimensions|(tokens, heads, head_dim)|(1, 7, 4, 8)",
    ),
    "packed other value tokens": (
        lambda: packed(value=PACKED[:5]),
        ValueError,
        "same number of tokens|(5, 4, 8)|(7, 4, 8)",
    ),
    "packed other heads": (
        lambda: packed(key=PACKED[:, :2], value=PACKED[:, :2]),
        ValueError,
        "number of heads|(7, 2, 8)|enable_gqa=True",
    ),
    "bounds that do not start at 0": (
        lambda: packed(q=torch.tensor([1, 3, 7])),
        ValueError,
        "cu_seqlens_q must start at 0|got 1",
    ),
    "bounds that decrease": (
        lambda: packed(k=torch.tensor([0, 5, 3])),
        ValueError,
        "cu_seqlens_k must not decrease|5 followed by 3",
    ),
    "bounds beyond the tokens": (
        lambda: packed(q=torch.tensor([0, 3, 8])),
        ValueError,
        "cu_seqlens_q ends at 8|7 tokens",
    ),
    "longer than max_seqlen_q": (lambda: packed(longest_q=3), ValueError, "4 tokens|max_seqlen_q is 3"),
    "longer than max_seqlen_k": (lambda: packed(longest_k=2), ValueError, "4 tokens|max_seqlen_k is 2"),
    "bounds of another number": (
        lambda: packed(q=torch.tensor([0, 7])),
        ValueError,
        "same number of sequences|1 and 2",
    ),
    "bounds of rank 2": (lambda: packed(q=BOUNDS[None]), ValueError, "cu_seqlens_q|(sequences + 1,)|(1, 3)"),
    "no bounds at all": (lambda: packed(q=BOUNDS[:0]), ValueError, "cu_seqlens_q|(sequences + 1,)|(0,)"),
    "float bounds": (lambda: packed(k=BOUNDS.float()), TypeError, "cu_seqlens_k|int32 or int64|float32"),
    "list of bounds": (lambda: packed(q=[0, 3, 7]), TypeError, "cu_seqlens_q|int32 or int64|list"),
    "bounds elsewhere": (lambda: packed(q=BOUNDS.to("meta")), ValueError, "cu_seqlens_q is on meta|tokens are on cpu"),
    "tensor for max_seqlen": (
        lambda: packed(longest_q=torch.tensor(4)),
        TypeError,
        "max_seqlen_q must be an int|Tensor",
    ),
    "text for max_seqlen": (lambda: packed(longest_q="4"), TypeError, "max_seqlen_q must be an int|str"),
    "float for max_seqlen": (lambda: packed(longest_k=4.0), TypeError, "max_seqlen_k must be an int|float"),
    "negative max_seqlen": (lambda: packed(longest_k=-1), ValueError, "max_seqlen_k must not be negative|-1"),
    "packed causal with other lengths": (
        lambda: packed(k=torch.tensor([0, 4, 7]), is_causal=True),
        ValueError,
        "as many queries as keys in each sequence|flow_attention_recurrent",
    ),
    # the other calls check alike
    "maps with other head dims": (lambda: flow_maps(X, X[..., :6]), ValueError, "same head dimension|(2, 4, 5, 6)"),
    "maps, causal with other lengths": (
        lambda: flow_maps(X[:, :, :3], X, is_causal=True),
        ValueError,
        "3 queries and 5 keys",
    ),
    "explain an unknown backend": (
        lambda: explain(X, X, X, backend="xyz"),
        ValueError,
        "unknown backend 'xyz'|'torch'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake(mistake):
    call, exception, parts = MISTAKES[mistake]
    with pytest.raises(exception) as raised:
        call()
    assert type(raised.value) is exception
    for part in parts.split("|"):
        assert part in str(raised.value)
    assert re.fullmatch(r"[^\n]*[.?]", str(raised.value)), "one line, a whole sentence"


# each of these was once a mistake next door: they must go through
@pytest.mark.parametrize(
    "call",
    [
        lambda: attend(scale=2),
        lambda: attend(scale=None, variant="core"),
        lambda: attend(X[:, :, :3]),
        lambda: attend(value=X[..., :3]),
        lambda: attend(key=X[:, :2], value=X[:, :2], enable_gqa=True),
        lambda: packed(q=BOUNDS.int(), longest_q=100, longest_k=100),
        lambda: packed(q=torch.tensor([0, 3, 5])),
        lambda: packed(q=torch.tensor([0]), k=torch.tensor([0]), longest_q=0, longest_k=0),
        lambda: continued(FlowState.empty(2, 4, 8), X.bfloat16()),
    ],
    ids=[
        "integer scale", "named variant", "cross-attention", "other value dim", "shared heads", "mixed bounds",
        "spare tokens", "no sequences", "float32 state of bfloat16 tokens",
    ],
)  # fmt: skip
def test_accepted(call):
    result = call()
    result = result[0] if isinstance(result, tuple) else result
    assert result.numel()
    assert result.isfinite().all()


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(
    "bounds", [[1, 3, 7], [0, 5, 3], [0, 3, 8]], ids=["not from 0", "decreasing", "beyond the tokens"]
)
def test_bad_bounds_are_refused_by_every_backend(backend, bounds):
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        packed(q=torch.tensor(bounds), backend=backend)
