"""Linearizing encoders, classifiers, vision models, and decoders of several architectures."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from language import BERT, LLAMA, SHORT, VIT, WORDS, documents
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from flowformer.linearize import LinearizeConfig, linearize
from flowformer.linearize.pair import Pair
from flowformer.linearize.text import PackedRows, PaddedRows
from flowformer.linearize.transfer import make_batches


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
    """A classifier returns one row per document, (B, labels): there are no tokens to average over."""
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


def test_one_document_per_update():
    """A classifier gives it one row, which has no variance to be relative to."""
    config = copy.deepcopy(BERT)
    config.num_labels = 3
    student = linearize(AutoModelForSequenceClassification.from_config(config))
    options = LinearizeConfig(**SHORT | {"batch_size": 1, "transfer_tokens": 0, "lora_tokens": 300})
    *_, lora = student.transfer(documents(60), options).stages
    assert 0 < lora.loss < 10


def test_a_decoder_without_a_head_learns_its_hidden_states(trained):
    student = linearize(copy.deepcopy(trained).model)
    options = SHORT | {"transfer_tokens": 500, "lora_tokens": 500}
    report = student.transfer(documents(60), LinearizeConfig(**options), evaluate=documents(16, seed=5))
    exchanged, _, lora = (stage.scores["cosine"] for stage in report.stages)
    assert exchanged < lora


@pytest.mark.parametrize(("features", "positions"), [("bert", 12), ("roberta", 10)])
def test_rows_are_no_longer_than_the_model_has_positions(features, positions):
    """RoBERTa numbers its first token padding_idx + 1, so that two of its positions are unused."""
    options = BERT.to_dict() | {"max_position_embeddings": 12, "pad_token_id": 1}
    config = {"bert": transformers.BertConfig, "roberta": transformers.RobertaConfig}[features].from_dict(options)
    student = linearize(AutoModel.from_config(config))
    assert student.longest == positions
    report = student.transfer(documents(9), LinearizeConfig(transfer_tokens=99, lora_tokens=0))
    assert report.stages[1].tokens == 8 * positions * report.stages[1].steps  # all documents but one are longer


def test_images_are_batches_of_inputs():
    torch.manual_seed(0)
    student = linearize(AutoModel.from_config(copy.deepcopy(VIT)))
    batches = [{"pixel_values": torch.randn(4, 3, 8, 8)} for _ in range(3)]
    options = SHORT | {"transfer_tokens": 200, "lora_tokens": 200}
    exchanged, transferred, lora = student.transfer(batches, LinearizeConfig(**options)).stages
    assert transferred.steps > 3
    assert sum(transferred.errors) < sum(exchanged.errors)
    assert lora.loss is not None


def test_layers_that_the_inputs_do_not_run_are_named():
    """Text alone does not run the vision encoder of LLaVA, which would stay untrained."""
    vision = copy.deepcopy(VIT).to_dict() | {"model_type": "clip_vision_model"}
    config = transformers.LlavaConfig(vision_config=vision, text_config=LLAMA.to_dict(), image_token_index=WORDS - 1)
    student = linearize(transformers.LlavaForConditionalGeneration(config))
    with pytest.raises(ValueError, match=r"do not run 1 of the 3 attention layers to train, such as .*vision_tower"):
        student.transfer(documents(30), LinearizeConfig(**SHORT))


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


SIZES = {k: getattr(LLAMA, k) for k in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
SIZES |= {"num_hidden_layers": 2, "eos_token_id": 1}


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (LLAMA, PackedRows),
        (transformers.OPTConfig(**SIZES, ffn_dim=32, word_embed_proj_dim=32), PaddedRows),
        (transformers.Lfm2Config(**SIZES, num_key_value_heads=2, layer_types=["conv", "full_attention"]), PaddedRows),
        (transformers.CTRLConfig(vocab_size=WORDS, n_embd=32, dff=32, n_layer=2, n_head=4), PackedRows),
    ],
    ids=["llama", "opt", "lfm2", "ctrl"],
)
@torch.no_grad()
def test_documents_do_not_see_each_other(config, rows):
    """Each document gives the same result alone and in its row, in teacher and student; no token is dropped."""
    torch.manual_seed(0)
    student = linearize(AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval())
    options = LinearizeConfig(length=24, batch_size=4)
    batches, pair = make_batches(student, documents(9), options), Pair(student, options)
    assert type(batches) is rows
    if rows is PaddedRows:
        assert batches.lengths.sum() == sum(len(document) + 1 for document in documents(9))
    batch = batches.batch(0, 4)
    tokens, mask = batch["input_ids"], batch.get("attention_mask", torch.ones(4, 24)).bool()
    begins = torch.zeros_like(mask) if rows is PaddedRows else batch["position_ids"] == 0
    begins[:, 0] = True
    for run in (pair.teacher_output, pair.student_output):
        together = run(batch)
        for row in range(4):
            document = begins[row].cumsum(0)[mask[row]]
            for number in document.unique():
                columns = (document == number).nonzero()[:, 0]
                alone = run({"input_ids": tokens[row, columns][None]})[0]
                torch.testing.assert_close(together[row, columns], alone, rtol=1e-4, atol=1e-5)
