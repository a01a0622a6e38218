"""Context parallelism in models of transformers: sequences cut over ranks give the result of the whole sequence."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from helpers import assert_same
from processes import run_ranks
from torch.distributed.tensor.experimental import context_parallel
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

from flowformer.integrations.transformers import FlowformerConfig, cut_sequences
from flowformer.integrations.transformers.linearized_heads import Exchange

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

RANKS = 4
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 23}
NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
PRETRAINED = {
    "flowformer": (AutoModelForCausalLM, FlowformerConfig(**TINY, dropout=0.0)),
    "flowformer, masked": (AutoModelForMaskedLM, FlowformerConfig(**TINY, dropout=0.0, is_causal=False)),
    "llama": (AutoModelForCausalLM, transformers.LlamaConfig(**TINY, num_key_value_heads=2)),
    "linearized llama": (
        AutoModelForCausalLM,
        transformers.LlamaConfig(**TINY, num_key_value_heads=2, flow_attention=Exchange().to_dict()),
    ),
    "gpt2": (
        AutoModelForCausalLM,
        transformers.GPT2Config(
            vocab_size=23, n_embd=16, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        ),
    ),
    "eurobert": (AutoModelForMaskedLM, transformers.EuroBertConfig(**TINY, pad_token_id=0)),
    "roberta": (AutoModelForMaskedLM, transformers.RobertaConfig(**TINY, **NO_DROPOUT, pad_token_id=0)),
}


def pretrained_model(name):
    auto, config = PRETRAINED[name]
    options = {} if name.startswith("flowformer") else {"attn_implementation": "flow_attention"}
    torch.manual_seed(0)
    return auto.from_config(copy.deepcopy(config), **options).double()


def pretrained(name, rank=None, group=None):
    """Return logits, loss and gradients of a model on a padded batch, some of whose labels are ignored."""
    model = pretrained_model(name)
    if group is not None:
        cut_sequences(model, group)
    part = slice(None) if rank is None else slice(*(0, 4, 5, 9, 16)[rank : rank + 2])
    tokens = torch.randint(1, 23, (2, 16), generator=torch.Generator().manual_seed(0))
    labels = tokens.where(torch.arange(16) % 7 != 3, -100)
    mask = (torch.arange(16) < torch.tensor([[16], [11]])).long()
    labels = labels.where(mask.bool(), -100)
    own_loss = name == "roberta"  # computes its loss itself, over this rank's tokens
    out = model(tokens[:, part], attention_mask=mask[:, part], labels=None if own_loss else labels[:, part])
    logits = out.logits.masked_fill(~mask[:, part, None].bool(), 0)
    loss = logits.square().sum() if own_loss else out.loss
    loss.backward()
    return logits.detach(), loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def refused_models(world, mesh):
    """Yield (name, error message) of models that cut_sequences refuses, and of calls that would be silently wrong."""
    tokens = torch.randint(1, 23, (2, 8))
    model = pretrained_model("llama")

    def attempt(call):
        try:
            call()
        except (TypeError, ValueError, NotImplementedError) as error:
            return str(error)
        return "no error"

    softmax = AutoModelForCausalLM.from_config(copy.deepcopy(PRETRAINED["llama"][1]))
    yield "softmax", attempt(lambda: cut_sequences(softmax, world))
    classifier = AutoModelForSequenceClassification.from_config(FlowformerConfig(**TINY))
    yield "classifier", attempt(lambda: cut_sequences(classifier, world))
    config = transformers.MistralConfig(**TINY, num_key_value_heads=2, sliding_window=64)
    window = AutoModelForCausalLM.from_config(config, attn_implementation="flow_attention")
    yield "window", attempt(lambda: cut_sequences(window, world))
    own_loss = AutoModelForMaskedLM.from_config(
        transformers.RobertaConfig(**TINY), attn_implementation="flow_attention"
    )
    cut_sequences(own_loss, world)
    yield "own loss", attempt(lambda: own_loss(tokens, labels=tokens))
    yield "module", attempt(lambda: cut_sequences(torch.nn.Linear(2, 2), world))
    for name, each in {"llama": model, "flowformer": pretrained_model("flowformer")}.items():
        with context_parallel(mesh["context"], buffers=[tokens.clone()], buffer_seq_dims=[1]):
            yield f"{name}, rearranged", attempt(lambda each=each: each(tokens))
        cut_sequences(each, world)
        yield f"{name}, cache", attempt(lambda each=each: each(tokens, use_cache=True))
        cut_sequences(each, None)
        yield f"{name}, whole again", attempt(lambda each=each: each(tokens, use_cache=True))


def accelerated():
    """Return the gradients of a model sharded on accelerate's mesh, for two texts, each cut over two ranks.

    Also returns the message with which padding is refused.
    """
    # accelerate enables neither context parallelism nor FSDP on CPUs
    ParallelismConfig._validate_accelerator = lambda config, accelerator: None
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=2, dp_shard_size=2), fsdp_plugin=plugin)
    for state in (AcceleratorState, PartialState):
        state._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    model = pretrained_model("llama")
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    mesh = accelerator.torch_device_mesh
    cut_sequences(model, mesh["cp"])
    text = accelerated_texts()[mesh["dp_shard"].get_local_rank()][None]
    part = text.tensor_split([7], 1)[mesh["cp"].get_local_rank()]
    # FSDP averages over ranks; multiply to get the sum, which is the mean over both texts
    accelerator.backward(model(part, labels=part).loss / 2 * RANKS)
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
    try:
        model(part, attention_mask=(part > 5).long())
    except NotImplementedError as error:
        return gradients, str(error)


def accelerated_texts():
    return torch.randint(1, 23, (2, 16), generator=torch.Generator().manual_seed(0))


def work(rank, _):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    world = dist.group.WORLD
    results = {name: pretrained(name, rank, world) for name in PRETRAINED}
    results["refused models"] = dict(refused_models(world, mesh))
    results["accelerated"] = accelerated()
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of `work` on each rank."""
    return run_ranks(work, RANKS, tmp_path_factory)[1]


@pytest.mark.parametrize("name", PRETRAINED)
def test_model_of_transformers_on_cut_sequences_equals_the_whole(results, name):
    ours = [results[rank][name] for rank in range(RANKS)]
    logits, loss, gradients = pretrained(name)
    assert_same([torch.cat([each[0] for each in ours], 1)], [logits], ["logits"])
    # loss and gradients of the ranks are shares that sum to the whole
    assert_same([sum(each[1] for each in ours)], [loss], ["loss"], 1e-6)  # transformers computes the loss in float32
    summed = [sum(each) for each in zip(*(each[2] for each in ours), strict=True)]
    assert_same(summed, gradients, ["gradient"] * len(gradients), 1e-6)


def test_model_under_the_parallelism_config_of_accelerate(results):
    model, texts = pretrained_model("llama"), accelerated_texts()
    model(texts, labels=texts).loss.backward()
    truth = [parameter.grad for parameter in model.parameters()]
    for rank in range(RANKS):
        gradients, refused = results[rank]["accelerated"]
        assert_same(gradients, truth, ["gradient"] * len(truth), 1e-6)
        assert "got padding and accelerate's ParallelismConfig" in refused


def test_models_of_transformers_that_cannot_be_cut_are_refused(results):
    messages = results[0]["refused models"]
    assert 'build it with attn_implementation="flow_attention"' in messages["softmax"]
    assert "FlowformerForSequenceClassification cannot be cut over ranks: it does more" in messages["classifier"]
    assert "has a sliding window" in messages["window"]
    assert "RobertaForMaskedLM computes its loss itself" in messages["own loss"]
    assert "takes a model of transformers, got Linear" in messages["module"]
    for name in ("llama", "flowformer"):
        assert "inside torch's context_parallel" in messages[f"{name}, rearranged"]
        assert "take no cache" in messages[f"{name}, cache"]
        assert messages[f"{name}, whole again"] == "no error"
