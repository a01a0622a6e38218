"""The command `flowformer linearize`."""

from __future__ import annotations

import json
import runpy
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers import ROOT
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from flowformer.cli import app
from flowformer.integrations.transformers.linearized_heads import FlowHeads

LETTERS = "abcdefgh \n"
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SHORT = ["length=16", "batch_size=2", "transfer_tokens=100", "lora_tokens=100", "lora_rank=2", "keep_layers=[0]"]


def flowformer(*arguments, fails=False):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert (result.exit_code != 0) == fails, result.output
    return result.stdout if not fails else " ".join(result.output.split())


@pytest.fixture
def model(tmp_path):
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "[UNK]", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="[UNK]")
    torch.manual_seed(0)
    decoder = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=len(words), eos_token_id=1, pad_token_id=0, **SIZES)
    )
    encoder = transformers.BertModel(transformers.BertConfig(vocab_size=len(words), pad_token_id=0, **SIZES))
    for name, each in {"decoder": decoder, "encoder": encoder}.items():
        each.save_pretrained(tmp_path / name)
        fast.save_pretrained(tmp_path / name)
    (tmp_path / "text.txt").write_text("abc def gh\nhead bag\n" * 30)
    (tmp_path / "more.txt").write_text("bad cab fed\n" * 4)
    return tmp_path


def test_a_decoder_is_linearized_and_saved(model):
    out, text = model / "run", model / "text.txt"
    command = ["linearize", model / "decoder", "--text", text, "--text", model / "more.txt", "--out", out, *SHORT]
    result = json.loads(flowformer(*command, "--eval", model / "more.txt", "--json").splitlines()[-1])
    assert [stage["name"] for stage in result["stages"]] == ["exchanged", "transfer", "lora"]
    assert {"perplexity", "teacher perplexity", "perplexity by word", "KL"} <= set(result["stages"][-1]["scores"])
    assert (out / "tensorboard").is_dir()
    assert "perplexity by word" in (out / "results.md").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(out / "model")
    assert sum(isinstance(module, FlowHeads) for module in loaded.modules()) == 1
    assert "Resume it with --resume" in flowformer(*command, fails=True)
    assert "lora" in flowformer(*command, "--resume")


def test_only_rank_0_saves_and_prints(model, monkeypatch):
    """As under torchrun, where every rank runs the command and they would write the same files at the same time."""
    command = ["linearize", model / "decoder", "--text", model / "text.txt", "--out", model / "run", *SHORT, "--json"]
    monkeypatch.setenv("RANK", "1")
    assert flowformer(*command) == ""
    assert not (model / "run" / "model").exists()


def test_an_encoder_learns_from_lines(model):
    command = ["linearize", model / "encoder", "--encoder", "--text", model / "text.txt", "--out", model / "run"]
    shown = flowformer(*command, *SHORT, "--eval", model / "more.txt")
    assert "cosine" in shown
    assert (model / "run" / "model" / "config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["windw=3"], "did you mean 'window'?"),
        (["window"], "key=value"),
        (["length=1024"], "a row has 1024"),
        (["minutes=long"], "wrong kind"),
        (["window=wide"], "window must be a whole number, got 'wide'"),
        (["gain=no"], "gain must be true or false, got 'no'"),
        (["--eval", "latin.txt"], "latin.txt is no text in UTF-8"),
    ],
)
def test_wrong_arguments_are_reported(model, arguments, words, monkeypatch):
    monkeypatch.chdir(model)
    (model / "latin.txt").write_bytes("café".encode("latin-1"))
    command = ["linearize", model / "decoder", "--text", model / "text.txt", "--out", model / "run", *SHORT]
    assert words in flowformer(*command, *arguments, fails=True)


def test_an_encoder_is_not_taken_for_a_decoder(model):
    command = ["linearize", model / "encoder", "--text", model / "text.txt", "--out", model / "run", *SHORT]
    assert "Pass --encoder" in flowformer(*command, fails=True)


def test_the_example_makes_a_table(model, monkeypatch):
    """The table has all rows; a second run reuses the results of the first and starts no process."""
    options = ["--every", "2", "--text", "text.txt", "--eval", "more.txt", *SHORT[:-1], "length=70"]

    def run(command, **_):
        return SimpleNamespace(returncode=0, communicate=lambda: (flowformer(*command[3:]), None))

    monkeypatch.chdir(model)
    monkeypatch.setattr(subprocess, "Popen", run)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers would stay installed after the test
    monkeypatch.setattr(sys, "argv", ["linearize_table.py", "decoder", "table", *options])
    example = str(ROOT / "examples" / "linearize_table.py")
    rows = runpy.run_path(example)["ROWS"]
    table = (model / "table" / "table.md").read_text()
    assert "KL, exchanged | KL, transfer | KL, lora" in table
    assert len(table.splitlines()) == 2 + len(rows)
    assert "1 layer in 2 kept" in table
    monkeypatch.setattr(subprocess, "Popen", None)
    runpy.run_path(example)
    assert (model / "table" / "table.md").read_text() == table
