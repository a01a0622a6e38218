"""The classifiers of long sequences: published sizes and function, padding, and what every model must do."""

from __future__ import annotations

import resource
import runpy
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from helpers import ROOT, assert_like_gradients, oracle
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flowformer.models.classifier import PRESETS, ClassifierConfig, FlowformerClassifier, FlowformerPairClassifier

EXAMPLE = ROOT / "examples" / "long_sequences.py"
SMALL = ClassifierConfig(
    vocab_size=20, num_classes=3, max_length=12, embed_dim=16, qkv_dim=24, mlp_dim=32, num_layers=2, num_heads=3
)
CONFIGS = {
    "cls": SMALL,
    "first": replace(SMALL, pooling="first"),
    "mean": replace(SMALL, pooling="mean"),
    "cls, learned positions": replace(SMALL, positions="learned"),
    "mean, learned positions": replace(SMALL, pooling="mean", positions="learned"),
}


def build(config=SMALL, cls=FlowformerClassifier, dtype=torch.float64, seed=0):
    """A model whose every parameter matters: the zeros it starts from are moved."""
    torch.manual_seed(seed)
    model = cls(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def random_tokens(batch=2, length=9, seed=0):
    return torch.randint(1, 20, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(lengths=(9, 4, 1), left=(0, 3, 5), length=9):
    """Sequences, and the batch of them with 0 on both sides."""
    parts = [random_tokens(1, n, seed=n) for n in lengths]
    rows = [F.pad(part, (before, length - n - before)) for part, n, before in zip(parts, lengths, left, strict=True)]
    return parts, torch.cat(rows)


def inputs(cls, **options):
    return [random_tokens(seed=seed, **options) for seed in range(1 if cls is FlowformerClassifier else 2)]


both_classes = pytest.mark.parametrize("cls", [FlowformerClassifier, FlowformerPairClassifier])
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


# layers/heads/emb/qkv/mlp, length, classes, dropout, pooling, positions, and parameters, to the digits published
PUBLISHED = {
    "listops": ("1/2/512/512/1024", 2000, 10, 0.1, "cls", "sinusoidal", 2_646_538),
    "text": ("1/4/256/256/1024", 1000, 2, 0.1, "cls", "sinusoidal", 1_120_514),
    "retrieval": ("4/4/128/128/512", 4000, 2, 0.1, "first", "sinusoidal", 1_087_618),
    "image": ("1/4/128/64/128", 1024, 10, 0.3, "cls", "learned", 248_458),
    "pathfinder": ("1/8/256/128/256", 1024, 2, 0.2, "mean", "sinusoidal", 396_034),
}


def full_size(task, config):
    cls = FlowformerPairClassifier if task == "retrieval" else FlowformerClassifier
    with torch.device("meta"):
        return cls(config)


@pytest.mark.parametrize("task", PRESETS)
def test_preset_is_the_published_model(task):
    c = PRESETS[task]
    sizes = "/".join(map(str, (c.num_layers, c.num_heads, c.embed_dim, c.inner_dim, c.mlp_dim)))
    parameters = full_size(task, c).num_parameters()
    found = (sizes, c.max_length, c.num_classes, c.dropout, c.pooling, c.positions, parameters)
    assert found == PUBLISHED[task]
    # a black pixel is no padding
    assert c.padding_id == (None if task in ("image", "pathfinder") else 0)


@pytest.mark.parametrize(
    ("task", "changes", "millions"),
    [
        ("listops", {"num_layers": 4, "num_heads": 8}, 8.95),
        ("text", {"num_layers": 4}, 3.49),
        ("retrieval", {}, 1.09),
        ("image", {"num_heads": 8}, 0.248458),
        ("pathfinder", {"num_layers": 4, "num_heads": 4, "embed_dim": 32, "qkv_dim": 16, "mlp_dim": 32}, 0.02653),
    ],
)
def test_size_of_the_benchmarks_own_transformer(task, changes, millions):
    softmax = full_size(task, replace(PRESETS[task], attention="softmax", **changes)).num_parameters()
    flow = full_size(task, replace(PRESETS[task], **changes)).num_parameters()
    assert softmax == flow  # Flow-Attention adds no parameter
    digits = len(str(millions).partition(".")[2])
    assert round(softmax / 1e6, digits) == millions


def published(state, config, tokens):
    """The encoder as its authors describe it, written down once more from its weights, without padding."""
    sizes = {"eps": 1e-6, "normalized_shape": (config.embed_dim,)}

    def norm(x, name):
        return F.layer_norm(x, weight=state[f"{name}.weight"], bias=state[f"{name}.bias"], **sizes)

    def linear(x, name):
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    x = state["embedding.weight"][tokens]
    if config.pooling == "cls":
        x = torch.cat([state["cls"].expand(len(x), 1, -1), x], 1)
    if config.positions == "learned":
        x = x + state["positions.weight"][: x.shape[1]]
    else:
        for p in range(x.shape[1]):
            for i in range(0, config.embed_dim, 2):
                angle = torch.tensor(p / 10000 ** (i / config.embed_dim), dtype=x.dtype)
                x[:, p, i] += angle.sin()
                x[:, p, i + 1] += angle.cos()
    for i in range(config.num_layers):
        layer = f"layers.{i}"
        y = norm(x, f"{layer}.attention_norm")
        q, k, v = (y @ state[f"{layer}.attention.{c}_proj.weight"].T for c in "qkv")
        q, k, v = (z.unflatten(-1, (config.num_heads, -1)).transpose(1, 2) for z in (q, k, v))
        x = x + oracle(q, k, v).transpose(1, 2).flatten(2) @ state[f"{layer}.attention.out_proj.weight"].T
        y = linear(norm(x, f"{layer}.mlp_norm"), f"{layer}.mlp.linear1")
        x = x + linear(F.gelu(y, approximate="tanh"), f"{layer}.mlp.linear2")
    x = norm(x, "norm")
    x = x.mean(1) if config.pooling == "mean" else x[:, 0]
    return linear(F.relu(linear(x, "head.0")), "head.2")


@every_config
@torch.no_grad()
def test_function_is_the_published_one(config):
    model = build(config)
    tokens = random_tokens()
    expected = published(model.state_dict(), config, tokens)
    torch.testing.assert_close(model(tokens), expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_pairs_are_two_towers_of_one_encoder():
    model = build(CONFIGS["first"], FlowformerPairClassifier)
    first, second = random_tokens(length=9, seed=1), random_tokens(length=5, seed=2)
    vectors = torch.cat([model.encode(first), model.encode(second)], -1)
    x = F.relu(model.head[2](F.relu(model.head[0](vectors))))
    assert x.shape == (2, SMALL.mlp_dim // 2)
    torch.testing.assert_close(model(first, second), model.head[4](x), rtol=0, atol=0)
    # a document does not see its partner, but the head knows which is which
    torch.testing.assert_close(model.encode(first[:1]), model.encode(first)[:1], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(model(first, second), model(second, first))


def test_start_is_the_published_one():
    torch.manual_seed(0)
    model = FlowformerClassifier(replace(PRESETS["image"], qkv_dim=192))
    layer = model.layers[0]
    assert not [name for name, _ in layer.attention.named_parameters() if name.endswith("bias")]
    assert not model.cls.any()
    assert not any(linear.bias.any() for linear in (model.head[0], model.head[2]))
    for weight, std in {
        model.embedding.weight: 1.0,
        model.positions.weight: 0.02,
        layer.attention.q_proj.weight: (2 / (128 + 192)) ** 0.5,
        layer.attention.out_proj.weight: (2 / (128 + 192)) ** 0.5,
        layer.mlp.linear1.weight: (2 / (128 + 128)) ** 0.5,
        layer.mlp.linear2.bias: 1e-6,
        model.head[0].weight: 128**-0.5,
    }.items():
        # four standard errors of a deviation
        assert weight.std().item() == pytest.approx(std, rel=4 / (2 * weight.numel()) ** 0.5)
    assert model.head[0].weight.abs().max() <= 2 / 0.8796 * 128**-0.5 * 1.001


@pytest.mark.parametrize("attention", ["flow", "softmax", "linear"])
@every_config
@torch.no_grad()
def test_padded_batch_equals_its_parts(config, attention):
    model = build(replace(config, attention=attention))
    parts, batch = padded()
    expected = torch.cat([model(part) for part in parts])
    torch.testing.assert_close(model(batch), expected, rtol=1e-10, atol=1e-10)
    # the mask alone decides: what padding holds is not looked at
    other = batch.where(batch != 0, 7)
    torch.testing.assert_close(model(other, batch != 0), expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_padded_pairs_equal_their_parts():
    model = build(CONFIGS["first"], FlowformerPairClassifier)
    firsts, first = padded()
    seconds, second = padded(lengths=(2, 12, 7), left=(3, 0, 1), length=12)
    expected = torch.cat([model(a, b) for a, b in zip(firsts, seconds, strict=True)])
    torch.testing.assert_close(model(first, second), expected, rtol=1e-10, atol=1e-10)
    result = model(first.where(first != 0, 7), second.where(second != 0, 7), first != 0, second != 0)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)


@every_config
def test_padding_learns_nothing(config):
    model = build(config)
    _, batch = padded()
    model(batch).square().sum().backward()
    gradient = model.embedding.weight.grad
    assert not gradient[0].any()
    assert gradient[1:].any()


@every_config
@torch.no_grad()
def test_authors_switch_lets_padding_take_part(config):
    _, batch = padded(left=(0, 0, 0))
    authors = build(replace(config, mask_padding=False))
    torch.testing.assert_close(authors(batch), published(authors.state_dict(), config, batch), rtol=1e-10, atol=1e-10)
    assert torch.equal(authors(batch), authors(batch, batch != 0))
    assert (authors(batch) - build(config)(batch))[1:].abs().max() > 1e-4


@torch.no_grad()
def test_without_padding_id_every_token_is_data():
    model = build(replace(SMALL, padding_id=None))
    pixels = random_tokens() * (torch.arange(9) % 2)
    expected = published(model.state_dict(), SMALL, pixels)
    torch.testing.assert_close(model(pixels), expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_padding_is_the_token_that_the_config_names():
    model = build(replace(SMALL, padding_id=19))
    parts = [random_tokens(1, n, seed=n) % 19 for n in (9, 4)]  # 0 is data
    batch = torch.cat([parts[0], F.pad(parts[1], (0, 5), value=19)])
    torch.testing.assert_close(model(batch), torch.cat([model(part) for part in parts]), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_dropout_reaches_the_embeddings():
    model = build(replace(SMALL, dropout=1.0)).train()
    assert torch.equal(model(random_tokens(seed=1)), model(random_tokens(seed=2)))


@every_config
@torch.no_grad()
def test_sequence_of_padding_alone(config):
    """It gives one result, however long it is and whatever stands beside it."""
    model, tokens = build(config), random_tokens(length=9)
    tokens[0] = 0
    torch.testing.assert_close(model(torch.zeros(1, 5, dtype=torch.long))[0], model(tokens)[0])


@torch.no_grad()
def test_sinusoids_have_no_longest_length():
    model = build()
    tokens = random_tokens(length=50)
    torch.testing.assert_close(model(tokens), published(model.state_dict(), SMALL, tokens), rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="only 13 learned"):
        build(CONFIGS["cls, learned positions"])(tokens)


@pytest.mark.parametrize("attention", ["flow", "softmax", "linear"])
@both_classes
def test_gradient_reaches_every_parameter(cls, attention):
    model = build(replace(CONFIGS["cls, learned positions"], max_length=9, attention=attention), cls).train()
    model(*inputs(cls)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@both_classes
def test_bf16_autocast(cls):
    model = build(SMALL, cls, dtype=torch.float32)
    # rounding can push an input of a ReLU across 0, which changes gradients by more than it is itself
    model.head = nn.Sequential(*(nn.Softplus() if isinstance(x, nn.ReLU) else x for x in model.head))
    exact = model(*inputs(cls))
    with torch.autocast("cpu", torch.bfloat16):
        result = model(*inputs(cls))
    assert result.dtype == torch.bfloat16
    assert (result.float() - exact).norm() < 0.05 * exact.norm()
    assert_like_gradients(model, result.float().square().sum(), exact.square().sum())


@both_classes
def test_gradient_checkpointing_changes_nothing(cls):
    results = []
    for checkpointing in (False, True):
        model = build(SMALL, cls).train()
        model.gradient_checkpointing = checkpointing
        torch.manual_seed(1)  # of the dropout
        loss = model(*inputs(cls)).square().sum()
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for plain, checkpointed in zip(*results, strict=True):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pooling", ["cls", "first", "mean"])
@torch.no_grad()
def test_compiled_model_gives_the_same(pooling):
    model = build(CONFIGS[pooling])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    _, batch = padded()
    torch.testing.assert_close(compiled(batch), model(batch), rtol=1e-12, atol=1e-12)


@both_classes
@torch.no_grad()
def test_save_and_load_round_trip(cls, tmp_path):
    config = replace(SMALL, qkv_dim=24, positions="learned", variant=replace(SMALL.variant, clamp=1.0))
    model = build(config, cls, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = cls.from_pretrained(tmp_path)
    assert loaded.config == config
    assert torch.equal(loaded(*inputs(cls)), model(*inputs(cls)))


@torch.no_grad()
def test_the_two_classes_do_not_load_each_other(tmp_path):
    build().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="FlowformerClassifier, not a FlowformerPairClassifier"):
        FlowformerPairClassifier.from_pretrained(tmp_path)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_interrupted_save_leaves_the_old_files_and_nothing_else(tmp_path, monkeypatch):
    build().save_pretrained(tmp_path)
    old = contents(tmp_path)

    def interrupted(model, path):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors.torch, "save_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(replace(SMALL, dropout=0.2), seed=1).save_pretrained(tmp_path)
    assert contents(tmp_path) == old


def test_a_full_disk_leaves_the_old_files_and_nothing_else(tmp_path):
    """A limit on the size of files stops the write in the middle, as a full disk does."""
    build().save_pretrained(tmp_path)
    old, limits = contents(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(old["model.safetensors"]) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match=r"model.safetensors could not be written: .*File too large"):
            build(replace(SMALL, dropout=0.2), seed=1).save_pretrained(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path) == old


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_file_is_named(tmp_path, name):
    build().save_pretrained(tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:50])
    with pytest.raises(ValueError, match=rf"{name} is damaged: "):
        FlowformerClassifier.from_pretrained(tmp_path)


def test_weights_of_another_version(tmp_path):
    build().save_pretrained(tmp_path)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    safetensors.torch.save_file({f"later.{name}": x for name, x in weights.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"(?s)model\.safetensors does not fit the .*config\.json: .*later\.cls"):
        FlowformerClassifier.from_pretrained(tmp_path)


def test_a_full_memory_is_no_misfit(tmp_path):
    build().save_pretrained(tmp_path)
    full = patch("safetensors.torch.load_model", side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    with full, pytest.raises(torch.OutOfMemoryError):
        FlowformerClassifier.from_pretrained(tmp_path)


@torch.no_grad()
def test_maps_of_each_layer():
    model = build()
    result, maps = model(random_tokens(), return_maps=True)
    assert torch.equal(result, model(random_tokens()))
    assert [layer.competition.shape for layer in maps] == [(2, 3, 10)] * 2
    assert [layer.allocation.shape for layer in maps] == [(2, 3, 10)] * 2
    pair = build(CONFIGS["first"], FlowformerPairClassifier)
    _, maps = pair(random_tokens(length=9), random_tokens(length=5), return_maps=True)
    assert [layer.competition.shape[-1] for layer in maps] == [9, 9, 5, 5]
    with pytest.raises(ValueError, match="no Flow-Attention"):
        build(replace(SMALL, attention="softmax"))(random_tokens(), return_maps=True)


@torch.no_grad()
def test_variant_reaches_the_attention():
    tokens = random_tokens()
    plain, paper = build(), build(replace(SMALL, variant=replace(SMALL.variant, rescale=False)))
    assert not torch.allclose(plain(tokens), paper(tokens))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be a positive whole number, got 0"),
        ({"vocab_size": -1}, "vocab_size must be a positive whole number, got -1"),
        ({"pooling": "avg"}, "unknown pooling 'avg'; accepted: cls, first, mean"),
        ({"positions": "learnt"}, "did you mean 'learned'"),
        ({"qkv_dim": 25}, "25, is not a positive multiple of num_heads 3"),
        ({"qkv_dim": None}, "16, is not a positive multiple of num_heads 3"),
        ({"padding_id": 20}, "padding_id 20 is no token; accepted: 0 to 19"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)


def test_unknown_attention():
    with pytest.raises(ValueError, match="did you mean 'softmax'"):
        FlowformerClassifier(replace(SMALL, attention="softmx"))


@pytest.mark.parametrize(
    ("tokens", "mask", "error", "message"),
    [
        (torch.zeros(2, 5), None, TypeError, "int32 or int64, got torch.float32"),
        (torch.zeros(2, 5, dtype=torch.uint8), None, TypeError, r"tokens\.long\(\)"),
        (torch.zeros(5, dtype=torch.long), None, ValueError, r"\(batch, length\).*got \(5,\)"),
        (torch.zeros(2, 0, dtype=torch.long), None, ValueError, "length at least 1"),
        (random_tokens(), torch.ones(2, 9), ValueError, "must be bool"),
        (random_tokens(), torch.ones(2, 10, dtype=torch.bool), ValueError, r"shape \(2, 9\) of the tokens"),
    ],
)
def test_input_errors(tokens, mask, error, message):
    with pytest.raises(error, match=message):
        build()(tokens, mask)


def test_it_learns():
    # which of two symbols a padded sequence holds more of
    torch.manual_seed(0)
    model = FlowformerClassifier(replace(SMALL, num_classes=2, dropout=0.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        tokens = torch.randint(1, 3, (32, 11)) * (torch.arange(11) < 2 * torch.randint(2, 6, (32, 1)) + 1)
        labels = ((tokens == 2).sum(1) > (tokens == 1).sum(1)).long()
        loss = nn.functional.cross_entropy(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2


def test_example_runs(capsys):
    assert len(EXAMPLE.read_text().splitlines()) <= 30
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    accuracy = float(capsys.readouterr().out.split("accuracy ")[-1].split()[0])
    assert accuracy > 0.9


PADDED = torch.tensor([13, 4, 1, 9])


def _padded_batch(side: str) -> torch.Tensor:
    tokens = torch.randint(1, 20, (4, 13))
    kept = torch.arange(13) < PADDED[:, None]
    return tokens * (kept if side == "right" else kept.flip(1))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pooling", ["cls", "first"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("attention", ["flow", "softmax", "linear", "linformer", "cosformer"])
def test_packed_equals_padded(side, pooling, checkpointing, attention):
    """Values and gradients of a batch whose padding is left out are those with it."""
    sizes = {"vocab_size": 20, "max_length": 13, "embed_dim": 16, "mlp_dim": 24, "num_layers": 2}
    config = ClassifierConfig(**sizes, pooling=pooling, dropout=0.0, attention_dropout=0.0, attention=attention)
    torch.manual_seed(0)
    model, tokens = FlowformerClassifier(config).double(), _padded_batch(side)
    model.gradient_checkpointing = checkpointing
    results = []
    for pack in (True, False):
        model.pack = pack
        with patch.object(model, "_encode_packed", wraps=model._encode_packed) as packed:
            scores = model(tokens)
        assert packed.called == pack
        results.append([scores, *torch.autograd.grad(scores.square().sum(), list(model.parameters()))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_lengths_that_cannot_be_read_are_padded():
    """In a trace, under torch.func, and of tensors without data: on the meta device, and in a FakeTensorMode."""
    model = FlowformerClassifier(ClassifierConfig(vocab_size=20, embed_dim=16, mlp_dim=24)).eval()
    tokens = _padded_batch("right")
    each = torch.vmap(lambda row: model(row[None])[0])(tokens)
    torch.testing.assert_close(each, model(tokens), rtol=1e-4, atol=1e-6)
    with patch.object(model, "_encode_packed", wraps=model._encode_packed) as packed:
        torch.jit.trace(model, tokens, check_trace=False)
    assert not packed.called
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(tokens)).shape == (4, 2)
    assert model.to("meta")(tokens.to("meta")).shape == (4, 2)


def test_what_cannot_be_packed_is_padded():
    """Maps, hooks, a sequence without tokens, mean pooling, and a batch that is nearly full."""
    small = ClassifierConfig(vocab_size=20, embed_dim=16, mlp_dim=24, pooling="first")
    empty = _padded_batch("right")
    empty[1] = 0
    full = torch.randint(1, 20, (4, 13))
    cases = [
        (small, empty),
        (small, full),
        (replace(small, pooling="mean"), _padded_batch("right")),
    ]
    for config, tokens in cases:
        model = FlowformerClassifier(config)
        with patch.object(model, "_encode_packed") as packed:
            assert model(tokens).isfinite().all()
        assert not packed.called
    model = FlowformerClassifier(small)
    _, maps = model(_padded_batch("right"), return_maps=True)
    assert maps[0].competition.shape == (4, 4, 13)
    shapes = []
    model.layers[0].attention.register_forward_hook(lambda module, args, result: shapes.append(result.shape))
    model(_padded_batch("right"))
    assert shapes == [(4, 13, 16)]


def test_a_batch_is_padded_if_the_mechanism_of_a_rival_has_a_hook():
    """Packed attention does not call it."""
    model = FlowformerClassifier(ClassifierConfig(vocab_size=20, embed_dim=16, mlp_dim=24, attention="softmax"))
    queries = []
    model.layers[0].attention.mechanism.register_forward_pre_hook(lambda module, args: queries.append(args[0]))
    with patch.object(model, "_encode_packed") as packed:
        model(_padded_batch("right"))
    assert not packed.called
    assert [query.shape for query in queries] == [(4, 4, 14, 4)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("attention", ["flow", "linear"])
def test_a_batch_is_padded_while_a_graph_is_captured(attention):
    config = ClassifierConfig(vocab_size=20, embed_dim=16, mlp_dim=24, attention=attention)
    model, tokens = FlowformerClassifier(config).eval().cuda(), _padded_batch("right").cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        expected = model(tokens)
        with torch.cuda.graph(graph):
            scores = model(tokens)
    graph.replay()
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
