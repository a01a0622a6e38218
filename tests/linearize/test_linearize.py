"""Linearizing a model: exchange, transfer, LoRA, resuming, saving, and what is refused."""

from __future__ import annotations

import copy
import json
import re
import signal
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import transformers
from helpers import ROOT
from language import LLAMA, WORDS, documents
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from flowformer import FlowVariant
from flowformer.integrations.transformers import FlowCache
from flowformer.integrations.transformers.heads import Exchange
from flowformer.linearize import LinearizeConfig, linearize
from flowformer.linearize.evaluate import HeldOut, cloze_accuracy, compare, generation_speed, rank_correlation
from flowformer.linearize.pair import Pair
from flowformer.linearize.text import NEARBY, PackedRows, Sentences, tokenize
from flowformer.train.loop import Interrupted

BERT = transformers.BertConfig(
    vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
)
VIT = transformers.ViTConfig(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
)
SHORT = {"length": 24, "batch_size": 4, "transfer_tokens": 3000, "lora_tokens": 3000, "lora_rank": 4}
SHORT |= {"transfer_lr": 1e-2, "lora_lr": 3e-3}


@pytest.fixture(scope="module")
def trained() -> transformers.LlamaForCausalLM:
    """A decoder of some thousand parameters that has learned the language of `documents`."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(copy.deepcopy(LLAMA))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    rows = PackedRows(documents(200), 24, 1, 0)
    for step in range(60):
        batch = rows.batch(step, 16)
        loss = model(**batch, labels=batch["input_ids"], use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 1.5
    return model.eval()


@pytest.fixture
def teacher(trained):
    return copy.deepcopy(trained)


def logits(model, tokens) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


TOKENS = documents(1, seed=9)[0][None, :12]


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
    """At every stage: whatever the student learns, its teacher does not move."""
    expected = logits(copy.deepcopy(teacher), TOKENS)
    student = linearize(teacher)
    config = LinearizeConfig(**SHORT)
    pair = Pair(student, config)
    torch.testing.assert_close(pair.taught({"input_ids": TOKENS}), expected)
    pair.add_lora(4, "all")
    for name, parameter in student.model.named_parameters():
        if "lora_" in name or ".flow." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    torch.testing.assert_close(pair.taught({"input_ids": TOKENS}), expected)
    with torch.no_grad():
        learned = pair.learned({"input_ids": TOKENS})
    pair.merge()
    torch.testing.assert_close(logits(student, TOKENS), learned, rtol=1e-4, atol=1e-4)


def test_stage_one_gets_the_teachers_inputs(teacher):
    """The error of an attention does not depend on what the layers before it have learned."""
    student = linearize(teacher)
    batch = PackedRows(documents(20), 24, 1, 0).batch(0, 4)
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
    batch = PackedRows(documents(20), 24, 1, 0).batch(0, 4)
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
    _, report, records = run(tmp_path / "cut", resume=True)  # nothing is left to do
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
    """Autocast leaves rotated queries and keys in float32 and rounds values: the attention takes both."""
    student = linearize(teacher)
    options = SHORT | {"transfer_tokens": 1000, "lora_tokens": 300, "precision": "bf16", "window": 3, "gain": True}
    exchanged, transferred, lora = student.transfer(documents(30), LinearizeConfig(**options)).stages
    assert sum(transferred.errors) < sum(exchanged.errors)
    assert lora.loss is not None
    assert {parameter.dtype for parameter in student.parameters()} == {torch.float32}
    half = student.model.bfloat16()
    recomputed = half.generate(TOKENS, max_new_tokens=3, use_cache=False)
    assert half.generate(TOKENS, max_new_tokens=3).shape == recomputed.shape


def test_time_ends_a_transfer(teacher):
    student = linearize(teacher)
    report = student.transfer(documents(30), LinearizeConfig(**SHORT | {"minutes": 0.01, "lora_tokens": 10**9}))
    assert report.stages[-1].tokens < 10**6
    assert 0 < report.stages[-1].minutes < 0.2


def test_encoders_learn_their_hidden_states():
    torch.manual_seed(0)
    model = AutoModel.from_config(copy.deepcopy(BERT)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    student = linearize(model)
    assert not student.is_decoder
    options = SHORT | {"transfer_tokens": 3000, "lora_tokens": 5000}
    report = student.transfer(documents(60), LinearizeConfig(**options), evaluate=documents(16, seed=5))
    exchanged, transferred, lora = (stage.scores["cosine"] for stage in report.stages)
    assert exchanged < transferred < lora
    assert lora > 0.8
    assert -1 <= report.stages[-1].scores["rank correlation"] <= 1


def test_a_classifier_of_documents_is_compared_by_its_scores():
    """Its rows have no tokens to take the mean of."""
    torch.manual_seed(0)
    config = copy.deepcopy(BERT)
    config.num_labels = 5
    model = AutoModelForSequenceClassification.from_config(config).eval()
    student, texts = linearize(model), documents(6, seed=5)
    options = SHORT | {"batch_size": 3, "transfer_tokens": 0, "lora_tokens": 0}
    (report, *_) = student.transfer(documents(9), LinearizeConfig(**options), evaluate=texts).stages

    def scores(attention):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            return torch.cat([model(text[None, : SHORT["length"]]).logits for text in texts])

    expected = torch.cosine_similarity(scores("flow_attention"), scores("sdpa")).mean()
    assert report.scores["cosine"] == pytest.approx(expected.item(), abs=1e-5)


def test_a_decoder_without_a_head_learns_its_hidden_states(trained):
    student = linearize(copy.deepcopy(trained).model)
    options = SHORT | {"transfer_tokens": 500, "lora_tokens": 500}
    report = student.transfer(documents(60), LinearizeConfig(**options), evaluate=documents(16, seed=5))
    exchanged, _, lora = (stage.scores["cosine"] for stage in report.stages)
    assert exchanged < lora


@pytest.mark.parametrize(("features", "positions"), [("bert", 12), ("roberta", 10)])
def test_rows_are_no_longer_than_the_model_has_positions(features, positions):
    """RoBERTa counts from the position after that of padding."""
    options = BERT.to_dict() | {"max_position_embeddings": 12, "pad_token_id": 1}
    config = {"bert": transformers.BertConfig, "roberta": transformers.RobertaConfig}[features].from_dict(options)
    student = linearize(AutoModel.from_config(config))
    assert student.longest == positions
    report = student.transfer(documents(9), LinearizeConfig(transfer_tokens=99, lora_tokens=0))
    assert report.stages[1].tokens == 8 * positions * report.stages[1].steps  # all documents are longer, but one


def test_attention_without_parameters_skips_its_transfer(teacher):
    exchange = {"features": "none", "variant": FlowVariant(), "powers": False}
    report = linearize(teacher).transfer(
        documents(60), LinearizeConfig(**SHORT, **exchange), evaluate=documents(9, seed=5)
    )
    exchanged, transferred, lora = report.stages
    assert transferred.tokens == 0
    assert transferred.scores == exchanged.scores
    assert lora.scores["KL"] < exchanged.scores["KL"]


def test_images_are_batches_of_inputs():
    torch.manual_seed(0)
    student = linearize(AutoModel.from_config(copy.deepcopy(VIT)))
    batches = [{"pixel_values": torch.randn(4, 3, 8, 8)} for _ in range(3)]
    options = SHORT | {"transfer_tokens": 200, "lora_tokens": 200}
    exchanged, transferred, lora = student.transfer(batches, LinearizeConfig(**options)).stages
    assert transferred.steps > 3
    assert sum(transferred.errors) < sum(exchanged.errors)
    assert lora.loss is not None


@pytest.mark.parametrize(
    "config",
    [
        transformers.GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1),
        transformers.Qwen3Config(
            **{k: getattr(LLAMA, k) for k in ("vocab_size", "hidden_size", "intermediate_size")},
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        ),
        transformers.Gemma2Config(
            **{k: getattr(LLAMA, k) for k in ("vocab_size", "hidden_size", "intermediate_size")},
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        ),
        transformers.DeepseekV3Config(
            **{k: getattr(LLAMA, k) for k in ("vocab_size", "hidden_size", "intermediate_size")},
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            first_k_dense_replace=1,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=6,
            v_head_dim=5,
        ),
    ],
    ids=["gpt2", "qwen3", "gemma2", "deepseek_v3"],
)
def test_other_architectures(config):
    torch.manual_seed(0)
    student = linearize(AutoModelForCausalLM.from_config(config))
    options = SHORT | {"transfer_tokens": 600, "lora_tokens": 600, "window": 4, "gain": True, "lora_layers": "all"}
    report = student.transfer(documents(30), LinearizeConfig(**options))
    assert sum(report.stages[1].errors) < sum(report.stages[0].errors)


def test_rows_are_packed_documents():
    rows = PackedRows(documents(7), 10, 1, 3)
    stream = torch.cat([torch.cat([each, torch.tensor([1])]) for each in documents(7)])
    assert torch.equal(rows.tokens.flatten().long(), stream[: rows.tokens.numel()])
    begins = rows.positions == 0
    assert begins[:, 0].all()
    assert torch.equal(rows.positions[:, 1:][~begins[:, 1:]], (rows.positions[:, :-1] + 1)[~begins[:, 1:]])
    counted = [int(i) for step in range(len(rows)) for i in rows.rows(step, 2)]
    assert sorted(counted[: len(rows)]) == list(range(len(rows))) == sorted(counted[len(rows) :])
    assert counted[: len(rows)] != counted[len(rows) :]
    shares = [rows.batch(5, 4, rank, 2)["input_ids"] for rank in (0, 1)]
    assert sorted(torch.cat(shares).tolist()) == sorted(rows.batch(5, 4)["input_ids"].tolist())


def test_sentences_of_an_update_have_similar_lengths():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 50, (NEARBY * 4,), generator=generator).tolist()
    sentences = Sentences([torch.full((length,), 5) for length in lengths], 99, 0, None, None, 3)
    updates = [sentences.rows(step, 4).tolist() for step in range(2 * NEARBY)]
    for epoch in (updates[:NEARBY], updates[NEARBY:]):
        assert sorted(row for rows in epoch for row in rows) == list(range(len(sentences)))
        ranges = sorted((min(lengths[row] for row in rows), max(lengths[row] for row in rows)) for rows in epoch)
        assert all(before[1] <= after[0] for before, after in pairwise(ranges))
    assert updates[:NEARBY] != updates[NEARBY:]
    assert updates[:NEARBY] != sorted(updates[:NEARBY], key=lambda rows: lengths[rows[0]])
    shares = [sentences.batch(5, 4, rank, 2)["input_ids"].ne(0).sum().item() for rank in (0, 1)]
    assert sum(shares) == sentences.batch(5, 4)["attention_mask"].sum()


def test_embeddings_of_all_sentences_are_compared_once():
    """By their means over tokens that are no padding, whatever the batches."""
    student = linearize(AutoModel.from_config(copy.deepcopy(BERT)).eval())
    texts = documents(7, seed=5)
    scores = []
    for batch_size in (1, 3):
        config = LinearizeConfig(length=24, batch_size=batch_size)
        scores.append(compare(Pair(student, config), HeldOut.of(student, texts, config)))
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    few = HeldOut.of(student, texts, LinearizeConfig(length=24, evaluate_tokens=50))
    assert few.sentences.lengths.sum() <= 50 < len(few.sentences) * 24 + 24


def test_evaluation_scores_every_token_once():
    class Uniform:
        def taught(self, batch):
            self.tokens = batch["input_ids"]
            return torch.zeros(*self.tokens.shape, WORDS)

        def learned(self, batch):
            return torch.zeros(*batch["input_ids"].shape, WORDS)

    for count in (2, 9, 10, 11, 57):
        held_out = HeldOut(torch.randint(WORDS, (count,)), 0, None, 10, 3)
        scored = sum(tokens[:, start:].numel() for tokens, start in held_out.windows())
        assert scored == count - 1
        scores = compare(Uniform(), held_out)
        assert scores["perplexity"] == pytest.approx(WORDS)
        assert scores["agreement"] == 1
        assert scores["KL"] == 0
    by_word = compare(Uniform(), HeldOut(torch.randint(WORDS, (21,)), 10, None, 10, 3))
    assert by_word["perplexity by word"] == pytest.approx(WORDS**2)
    assert rank_correlation(torch.arange(5.0), -torch.arange(5.0)) == -1


def test_cloze_accuracy_is_the_share_of_last_words_that_are_guessed():
    def tokenizer(text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text if letter != " "]}

    def logits(batch):
        """Those of a model that expects every second letter to be the same."""
        tokens = batch["input_ids"]
        return torch.nn.functional.one_hot(torch.cat([tokens[:, :1], tokens[:, :-1]], 1), 128).float()

    # one letter of the second is wrong; the last has no word before it
    assert cloze_accuracy(logits, ["ab ab", "ab ac", "a b a", "a"], tokenizer) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="no text has a word"):
        cloze_accuracy(logits, ["alone"], tokenizer)


def test_the_cache_of_a_student_does_not_grow(teacher):
    softmax = generation_speed(copy.deepcopy(teacher), [4, 40], batch_size=2, tokens=2)
    flow = generation_speed(linearize(teacher).model, [4, 40], batch_size=2, tokens=2)
    assert flow[0]["cache_bytes"] == flow[1]["cache_bytes"] > 0
    assert softmax[1]["cache_bytes"] > 3 * softmax[0]["cache_bytes"]
    assert all(row["tokens_per_second"] > 0 for row in softmax + flow)


def test_the_bytes_of_a_cache_include_recurrent_states():
    sizes = {k: getattr(LLAMA, k) for k in ("vocab_size", "hidden_size", "intermediate_size")}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32, "mamba_d_state": 8, "mamba_n_groups": 1}
    for config, recurrent in (
        (transformers.Lfm2Config(**sizes, num_hidden_layers=2, layer_types=["conv", "full_attention"]), 2 * 32 * 3),
        (transformers.FalconH1Config(**sizes, num_hidden_layers=1, **mamba), 2 * (48 * 4 + 4 * 8 * 8)),
    ):
        student = linearize(AutoModelForCausalLM.from_config(config).eval())
        (flow,) = {row["cache_bytes"] for row in generation_speed(student.model, [4, 9], batch_size=2, tokens=2)}
        cache = FlowCache(student.config)
        with torch.no_grad():
            student(torch.ones(2, 3, dtype=torch.long), past_key_values=cache)
        assert flow == 4 * recurrent + sum(x.nbytes for x in cache.layers[-1].state.pack())


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
    with pytest.raises(TypeError, match="1-d tensor of integers"):
        student.transfer([torch.randn(3)])
    with pytest.raises(TypeError, match=r"ViTModel reads no text\. Pass batches"):
        linearize(transformers.ViTModel(copy.deepcopy(VIT))).transfer(documents(3))
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
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        LinearizeConfig(**options)


def test_a_trained_student_keeps_its_exchange(teacher):
    student = linearize(teacher)
    options = SHORT | {"transfer_tokens": 200, "lora_tokens": 0}
    student.transfer(documents(30), LinearizeConfig(**options))
    with pytest.raises(ValueError, match="Linearize the model again"):
        student.transfer(documents(30), LinearizeConfig(**options, window=3))


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "linearize.md").read_text(), re.M | re.S)
    monkeypatch.chdir(tmp_path)  # it saves a student
    names = {}
    exec(compile(code, "linearize.md", "exec"), names)
    assert [stage.name for stage in names["report"].stages] == ["exchanged", "transfer", "lora"]


def test_text_needs_a_tokenizer_and_is_cut_into_pieces(monkeypatch):
    def tokenizer(texts, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    monkeypatch.setattr("flowformer.linearize.text.PIECE", 5)
    text = "one\ntwo, three and four\n\nfive"
    (tokens,) = tokenize([text, ""], tokenizer)
    assert "".join(map(chr, tokens.tolist())) == text
    with pytest.raises(TypeError, match="got int"):
        tokenize([3], tokenizer)
