"""Linearizing a decoder: exchange, transfer, LoRA, resuming, saving, and refused inputs."""

from __future__ import annotations

import copy
import json
import re
import signal
from dataclasses import replace

import pytest
import torch
import transformers
from helpers import ROOT
from language import SHORT, VIT, WORDS, documents
from transformers import AutoModelForCausalLM

from flowformer import FlowVariant
from flowformer.integrations.transformers.linearized_heads import Exchange
from flowformer.linearize import LinearizeConfig, linearize
from flowformer.linearize.pair import Pair
from flowformer.linearize.text import PackedRows
from flowformer.train.loop import Interrupted

TOKENS = documents(1, seed=9)[0][None, :12]


def logits(model, tokens) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def test_exchanging_keeps_every_weight(teacher):
    before = copy.deepcopy(teacher.state_dict())
    student = linearize(teacher)
    assert student.model is teacher
    after = student.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    added = set(after) - set(before)
    assert added
    assert all(".self_attn.flow." in name for name in added)
    assert student.config._attn_implementation == "flow_attention"


@pytest.mark.parametrize("stage", ["transfer", "lora"])
def test_a_transfer_that_diverges_stops(teacher, stage):
    config = LinearizeConfig(features="projection", **SHORT | {f"{stage}_lr": 1e38})
    with pytest.raises(FloatingPointError, match=f"diverged: the loss of update .* of stage '{stage}' is .*{stage}_lr"):
        linearize(teacher, config=config).transfer(documents(100), config)


def test_both_stages_learn(teacher, tmp_path):
    softmax = copy.deepcopy(teacher)
    student = linearize(teacher, config=LinearizeConfig(features="projection"))
    report = student.transfer(
        documents(100), LinearizeConfig(**SHORT), evaluate=documents(20, seed=5), folder=tmp_path / "run"
    )
    exchanged, transferred, lora = report.stages
    assert [stage.name for stage in report.stages] == ["exchanged", "transfer", "lora"]
    assert sum(transferred.errors) < 0.9 * sum(exchanged.errors)
    assert transferred.scores["KL"] < exchanged.scores["KL"]
    assert lora.scores["KL"] < 0.8 * transferred.scores["KL"]
    assert exchanged.scores["teacher perplexity"] == pytest.approx(lora.scores["teacher perplexity"], rel=1e-5)
    assert not any("lora" in name for name in student.state_dict())
    assert all(parameter.requires_grad for parameter in student.parameters())
    page = (tmp_path / "run" / "results.md").read_text()
    assert "| stage | exchanged | transfer | lora |" in page
    assert f"| {transferred.scores['perplexity']:.4f} | {lora.scores['perplexity']:.4f} |" in page
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").open()]
    steps = [0, transferred.steps, transferred.steps + lora.steps]
    assert [record["step"] for record in log if record["kind"] == "stage"] == steps

    student.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(logits(loaded, TOKENS), logits(student, TOKENS), rtol=1e-5, atol=1e-5)
    assert Exchange.of(loaded.config) == LinearizeConfig().exchange
    assert torch.equal(
        loaded.generate(TOKENS, max_new_tokens=9), loaded.generate(TOKENS, max_new_tokens=9, use_cache=False)
    )
    assert (logits(student, TOKENS) - logits(softmax, TOKENS)).abs().max() > 1e-3


def test_the_teacher_is_the_model_as_it_was(teacher):
    """The teacher's logits do not depend on the `FlowHeads` and the LoRA weights."""
    expected = logits(copy.deepcopy(teacher), TOKENS)
    student = linearize(teacher)
    config = LinearizeConfig(**SHORT)
    pair = Pair(student, config)
    torch.testing.assert_close(pair.teacher_output({"input_ids": TOKENS}), expected)
    pair.add_lora(4, "all")
    for name, parameter in student.model.named_parameters():
        if "lora_" in name or ".flow." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    torch.testing.assert_close(pair.teacher_output({"input_ids": TOKENS}), expected)
    with torch.no_grad():
        learned = pair.student_output({"input_ids": TOKENS})
    pair.merge()
    torch.testing.assert_close(logits(student, TOKENS), learned, rtol=1e-4, atol=1e-4)


def test_stage_one_gets_the_teachers_inputs(teacher):
    """The error of a layer does not depend on the `FlowHeads` of the layers before it."""
    student = linearize(teacher)
    batch = PackedRows(documents(20), 24, 0).batch(0, 4)
    pair = Pair(student, LinearizeConfig())
    before = pair.errors(batch, learns=False)
    torch.nn.init.normal_(student.heads[0].query_projection)
    after = pair.errors(batch, learns=False)
    assert after[0] != before[0]
    assert after[1] == before[1]
    assert all(parameter.grad is None for parameter in student.parameters())
    pair.errors(batch, learns=True)
    with_grad = {name for name, parameter in student.named_parameters() if parameter.grad is not None}
    assert with_grad == {name for name, _ in student.named_parameters() if ".flow." in name}


def test_kept_layers_and_windows_have_less_to_learn(teacher):
    batch = PackedRows(documents(20), 24, 0).batch(0, 4)
    errors = {}
    for name, options in {"none": {}, "window": {"window": 23}, "kept": {"keep_layers": (0,)}}.items():
        student = linearize(copy.deepcopy(teacher), config=LinearizeConfig(length=24, **options))
        errors[name] = Pair(student, student.config_of_exchange).errors(batch, learns=False)
    assert len(errors["kept"]) == 1
    assert errors["kept"][0] == errors["none"][1]
    assert sum(errors["window"]) < 0.1 * sum(errors["none"])


@pytest.mark.parametrize("stage", ["transfer", "lora"])
def test_an_interrupted_transfer_loses_nothing(teacher, tmp_path, stage):
    config = LinearizeConfig(**SHORT | {"transfer_tokens": 1000, "lora_tokens": 1000})

    def run(folder, resume=False, stop_at=None):
        student = linearize(copy.deepcopy(teacher))
        seen = []

        def report(record):
            seen.append(record)
            if record["kind"] == "train" and record["stage"] == stage and len(seen) == stop_at:
                signal.raise_signal(signal.SIGTERM)

        result = student.transfer(documents(100), config, folder=folder, resume=resume, report=report)
        return student, result, seen

    whole, expected, records = run(tmp_path / "whole")
    first = next(i for i, record in enumerate(records) if record.get("stage") == stage and record["kind"] == "train")
    with pytest.raises(Interrupted, match=stage):
        run(tmp_path / "cut", stop_at=first + 5)
    with pytest.raises(FileExistsError, match="Resume it"):
        run(tmp_path / "cut")
    resumed, report, _ = run(tmp_path / "cut", resume=True)
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    assert [each.loss for each in report.stages[1:]] == pytest.approx(
        [each.loss for each in expected.stages[1:]], rel=0.5
    )
    _, report, records = run(tmp_path / "cut", resume=True)  # the transfer is finished
    assert not [record for record in records if record["kind"] == "train"]
    assert len(report.stages) == 3
    with pytest.raises(ValueError, match="another transfer_lr"):
        linearize(copy.deepcopy(teacher)).transfer(
            documents(100), replace(config, transfer_lr=0.5), folder=tmp_path / "cut", resume=True
        )
    with pytest.raises(ValueError, match="another text"):
        linearize(copy.deepcopy(teacher)).transfer(documents(100, seed=1), config, folder=tmp_path / "cut", resume=True)
    torch.nn.init.zeros_(teacher.model.layers[1].mlp.down_proj.weight)
    with pytest.raises(ValueError, match="another model"):
        run(tmp_path / "cut", resume=True)
    checkpoint = tmp_path / "cut" / "transfer.pt"
    for size in (checkpoint.stat().st_size // 2, 99, 0):
        checkpoint.write_bytes(checkpoint.read_bytes()[:size])
        with pytest.raises(ValueError, match=r"transfer.pt is damaged: .*\. Delete it"):
            run(tmp_path / "cut", resume=True)


def test_an_interrupted_student_can_be_saved(teacher, tmp_path):
    """Its LoRA layers are removed: `from_pretrained` would not find the names of their weights."""
    student = linearize(teacher)

    def stop(record):
        if record["kind"] == "train" and record["stage"] == "lora":
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted, match="lora"):
        student.transfer(documents(30), LinearizeConfig(**SHORT | {"transfer_tokens": 200}), report=stop)
    assert not any("lora" in name for name in student.state_dict())
    assert all(parameter.requires_grad for parameter in student.parameters())
    student.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(loaded, TOKENS), logits(student, TOKENS), rtol=1e-5, atol=1e-5)


def test_a_trained_student_cannot_resume(teacher, tmp_path):
    """A transfer resumes from the original model, whose weights the checkpoint does not hold."""
    student, options = linearize(teacher), LinearizeConfig(**SHORT)

    def stop(record):
        if record["kind"] == "train":
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        student.transfer(documents(30), options, folder=tmp_path / "run", report=stop)
    with pytest.raises(ValueError, match=r"This student has been trained since: linearize the original model again"):
        student.transfer(documents(30), options, folder=tmp_path / "run", resume=True)


@pytest.mark.parametrize("evaluated_first", [True, False])
def test_evaluation_may_be_added_or_dropped_on_resume(teacher, tmp_path, evaluated_first):
    """The results page has empty cells for the stages without scores."""
    config = LinearizeConfig(**SHORT | {"transfer_tokens": 200, "lora_tokens": 200})
    held_out = documents(9, seed=5)

    def stop(record):
        if record["kind"] == "train":
            signal.raise_signal(signal.SIGTERM)

    options = {"folder": tmp_path / "run", "evaluate": held_out if evaluated_first else None}
    with pytest.raises(Interrupted):
        linearize(copy.deepcopy(teacher)).transfer(documents(30), config, report=stop, **options)
    options |= {"resume": True, "evaluate": None if evaluated_first else held_out}
    report = linearize(teacher).transfer(documents(30), config, **options)
    scored = [bool(stage.scores) for stage in report.stages]
    assert scored == ([True, False, False] if evaluated_first else [False, True, True])
    (row,) = [line for line in str(report).splitlines() if line.startswith("| perplexity |")]
    assert [bool(cell.strip()) for cell in row.split("|")[2:-1]] == scored


@pytest.mark.filterwarnings("error:.gradient_checkpointing_:FutureWarning")
def test_gradient_checkpointing_changes_nothing(teacher):
    results = []
    for checkpointing in (False, True):
        student = linearize(copy.deepcopy(teacher))
        options = SHORT | {"lora_tokens": 500, "transfer_tokens": 200, "gradient_checkpointing": checkpointing}
        student.transfer(documents(30), LinearizeConfig(**options))
        assert not student.training
        results.append(logits(student, TOKENS))
    torch.testing.assert_close(*results)


def test_bfloat16_learns_too(teacher):
    """Under autocast, rotated queries and keys are float32 and values bfloat16; the attention accepts the mix."""
    student = linearize(teacher)
    options = SHORT | {"transfer_tokens": 1000, "lora_tokens": 300, "precision": "bf16", "window": 3, "gain": True}
    exchanged, transferred, lora = student.transfer(documents(30), LinearizeConfig(**options)).stages
    assert sum(transferred.errors) < sum(exchanged.errors)
    assert lora.loss is not None
    assert {parameter.dtype for parameter in student.parameters()} == {torch.float32}
    half = student.model.bfloat16()
    recomputed = half.generate(TOKENS, max_new_tokens=3, use_cache=False)
    assert half.generate(TOKENS, max_new_tokens=3).shape == recomputed.shape


@torch.no_grad()
def test_time_ends_a_transfer(teacher):
    """The caller has disabled gradients, which `transfer` enables again."""
    student = linearize(teacher)
    report = student.transfer(documents(30), LinearizeConfig(**SHORT | {"minutes": 0.01, "lora_tokens": 10**9}))
    assert report.stages[-1].tokens < 10**6
    assert 0 < report.stages[-1].minutes < 0.2


def test_attention_without_parameters_skips_its_transfer(teacher):
    exchange = {"features": "none", "variant": FlowVariant(), "powers": False}
    report = linearize(teacher).transfer(
        documents(60), LinearizeConfig(**SHORT, **exchange), evaluate=documents(9, seed=5)
    )
    exchanged, transferred, lora = report.stages
    assert transferred.tokens == 0
    assert transferred.scores == exchanged.scores
    assert lora.scores["KL"] < exchanged.scores["KL"]


def test_bad_input_is_refused(teacher, tmp_path):
    with pytest.raises(TypeError, match=r"model of transformers, got Linear"):
        linearize(torch.nn.Linear(2, 2))
    t5 = transformers.T5Config(vocab_size=WORDS, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(NotImplementedError, match="cannot serve T5"):
        linearize(transformers.T5ForConditionalGeneration(t5))
    with pytest.raises(ValueError, match=r"keep_layers names \[7\]"):
        linearize(teacher, config=LinearizeConfig(keep_layers=(7,)))
    with pytest.raises(ValueError, match="nothing is exchanged"):
        linearize(teacher, config=LinearizeConfig(keep_layers=(0, 1)))
    assert teacher.config._attn_implementation == "sdpa"
    student = linearize(teacher)
    with pytest.raises(ValueError, match="has Flow-Attention already"):
        linearize(teacher)
    with pytest.raises(ValueError, match=r"Pass linearize\(model, tokenizer\)"):
        student.transfer(["some text"])
    with pytest.raises(TypeError, match=r"Pass \[text\]"):
        student.transfer("some text")
    with pytest.raises(ValueError, match="a row has 1024"):
        student.transfer(documents(3))
    with pytest.raises(ValueError, match="no text to learn from"):
        student.transfer([])
    with pytest.raises(ValueError, match="token 99, but the model knows 17"):
        student.transfer([torch.full((2000,), 99)])
    with pytest.raises(ValueError, match="token -1, but the model knows 17"):
        student.transfer(documents(100), LinearizeConfig(**SHORT), evaluate=[torch.tensor([3, -1, 2])])
    with pytest.raises(TypeError, match="1-d tensor of integers"):
        student.transfer([torch.randn(3)])
    vit, images = linearize(transformers.ViTModel(copy.deepcopy(VIT))), [{"pixel_values": torch.randn(4, 3, 8, 8)}]
    with pytest.raises(TypeError, match=r"ViTModel reads no text, got documents as texts\. Learn from batches"):
        vit.transfer(documents(3))
    with pytest.raises(TypeError, match="ViTModel reads no text, got documents as evaluate"):
        vit.transfer(images, LinearizeConfig(**SHORT), evaluate=documents(3))
    with pytest.raises(ValueError, match="without a folder"):
        student.transfer(documents(100), LinearizeConfig(**SHORT), resume=True)
    (tmp_path / "config.json").write_text("of something else")
    for resume in (False, True):
        with pytest.raises(FileExistsError, match="are no transfer's"):
            student.transfer(documents(100), LinearizeConfig(**SHORT), folder=tmp_path, resume=resume)
    assert (tmp_path / "config.json").read_text() == "of something else"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 64, "length": 64}, "nothing would be left"),
        ({"features": "cosine"}, "features"),
        ({"lora_rank": -1}, "lora_rank"),
        ({"minutes": 0}, "minutes"),
        ({"optimizer": "sgd"}, "optimizer"),
        ({"variant": FlowVariant()}, "renormalize"),
        ({"batch_size": 0}, "batch_size"),
        ({"length": 1}, "at least 2"),
        ({"gain": "no"}, "gain must be true or false, got 'no'"),
        ({"gradient_checkpointing": "False"}, "gradient_checkpointing must be true or false"),
        ({"window": 2.5}, "window must be a whole number, got 2.5"),
        ({"keep_layers": [0.5]}, r"keep_layers must be whole numbers, such as \(0, 3\), got \[0.5\]"),
        ({"keep_layers": 3}, "keep_layers must be whole numbers"),
        ({"lora_tokens": "1e6"}, "lora_tokens must be a whole number"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        LinearizeConfig(**options)


def test_large_numbers_may_be_written_short():
    config = LinearizeConfig.of(["lora_tokens=1e6", "lora_lr=1e-4", "gain=true"])
    assert (config.lora_tokens, config.lora_lr, config.gain) == (1_000_000, 1e-4, True)


def test_a_trained_student_keeps_its_exchange(teacher):
    student = linearize(teacher)
    options = SHORT | {"transfer_tokens": 200, "lora_tokens": 0}
    student.transfer(documents(30), LinearizeConfig(**options))
    with pytest.raises(ValueError, match="Linearize the model again"):
        student.transfer(documents(30), LinearizeConfig(**options, window=3))


def test_a_student_without_a_teacher_is_not_trained(teacher):
    student = linearize(teacher)
    config = LinearizeConfig(**SHORT | {"transfer_tokens": 200, "lora_tokens": 200})
    student.transfer(documents(30), replace(config, lora_tokens=0))
    student.transfer(documents(30), config)
    with pytest.raises(ValueError, match=r"its teacher no longer exists\. Linearize the original model again"):
        student.transfer(documents(30), config)


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "linearize.md").read_text(), re.M | re.S)
    monkeypatch.chdir(tmp_path)  # the code saves a student
    names = {}
    exec(compile(code, "linearize.md", "exec"), names)
    assert [stage.name for stage in names["report"].stages] == ["exchanged", "transfer", "lora"]
