"""The heads of the Flowformer models of transformers, their config, and their use with Trainer and PEFT."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT
from tiny_transformers import LEFT, PROMPTS, SIZES, STYLES, assert_close, language_model, randomized
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    BertConfig,
    Trainer,
    TrainingArguments,
)

from flowformer.integrations.transformers import (
    FlowformerConfig,
    FlowformerForMaskedLM,
    FlowformerForQuestionAnswering,
    FlowformerForTokenClassification,
)

PAGE = ROOT / "docs" / "transformers.md"


@pytest.mark.parametrize("mask", [LEFT, LEFT.flip(1)], ids=["left", "right"])
def test_heads_of_a_padded_batch_give_what_each_row_gives_alone(mask):
    config = FlowformerConfig(**SIZES | STYLES["paper"], is_causal=False, num_labels=4)
    for auto, name in (
        (AutoModelForMaskedLM, "logits"),
        (AutoModelForTokenClassification, "logits"),
        (AutoModelForQuestionAnswering, "start_logits"),
        (AutoModelForQuestionAnswering, "end_logits"),
    ):
        model = randomized(auto.from_config(config))
        together = model(PROMPTS, attention_mask=mask)[name][mask.bool()]
        alone = [model(row[keep][None])[name][0] for row, keep in zip(PROMPTS, mask.bool(), strict=True)]
        assert_close(together, torch.cat(alone))


def test_losses_of_the_heads():
    config = FlowformerConfig(**SIZES | STYLES["paper"], is_causal=False, num_labels=4)
    labels = PROMPTS.masked_fill(LEFT == 0, -100)
    masked = randomized(FlowformerForMaskedLM(config)).float()(PROMPTS, labels=labels)
    torch.testing.assert_close(masked.loss, F.cross_entropy(masked.logits.flatten(0, 1), labels.flatten()))
    labels = labels.clamp_max(3)
    tagged = randomized(FlowformerForTokenClassification(config)).float()(PROMPTS, labels=labels)
    torch.testing.assert_close(tagged.loss, F.cross_entropy(tagged.logits.flatten(0, 1), labels.flatten()))
    first, last = torch.tensor([0, 3, 6]), torch.tensor([1, 5, 6])
    answer = randomized(FlowformerForQuestionAnswering(config))(PROMPTS, start_positions=first, end_positions=last)
    ends = [F.cross_entropy(*pair) for pair in ((answer.start_logits, first), (answer.end_logits, last))]
    torch.testing.assert_close(answer.loss, sum(ends) / 2)
    with pytest.raises(ValueError, match="needs is_causal=False"):
        FlowformerForMaskedLM(FlowformerConfig(**SIZES))


def test_heads_share_their_weights_and_embeddings(tmp_path):
    config = FlowformerConfig(**SIZES | STYLES["paper"], is_causal=False)
    model = FlowformerForMaskedLM(config)
    assert model.lm_head.weight is model.model.lm.embedding.weight
    model.save_pretrained(tmp_path)
    for auto in (AutoModelForTokenClassification, AutoModelForQuestionAnswering):
        head = auto.from_pretrained(tmp_path)
        assert torch.equal(head.get_input_embeddings().weight, model.get_input_embeddings().weight)
        head.resize_token_embeddings(30)
        assert head(torch.tensor([[29]]))[0].isfinite().all()
        assert all(not p.any() for n, p in head.named_parameters() if n.endswith(("score.bias", "qa_outputs.bias")))


def test_label_smoothing_scores_the_next_token(tmp_path):
    """Trainer shifts the labels only if the class name is registered as a language model."""
    model = language_model().float()
    data = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in PROMPTS]
    losses = {}
    for smoothing in (0.0, 1e-6):
        arguments = TrainingArguments(
            str(tmp_path), use_cpu=True, report_to=[], label_smoothing_factor=smoothing, per_device_eval_batch_size=3
        )
        trainer = Trainer(model, arguments)
        batch = {name: torch.tensor([row[name] for row in data]) for name in data[0]}
        losses[smoothing] = trainer.compute_loss(model, batch).item()
    assert losses[1e-6] == pytest.approx(losses[0.0], rel=1e-4)


def test_models_are_registered_by_name():
    from transformers.models.auto import modeling_auto

    for task in ("", "FOR_CAUSAL_LM_", "FOR_MASKED_LM_", "FOR_QUESTION_ANSWERING_", "FOR_TOKEN_CLASSIFICATION_"):
        name = getattr(modeling_auto, f"MODEL_{task}MAPPING_NAMES")["flowformer"]
        assert getattr(modeling_auto, f"MODEL_{task}MAPPING")[FlowformerConfig].__name__ == name
    assert len(list(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING.keys())) > 100  # registering must not break listing


@pytest.mark.parametrize("name", ["num_layers", "hiden_size", "n_head"])
def test_a_misspelt_option_is_refused(name):
    with pytest.raises(TypeError, match=f"unexpected option '{name}'"):
        FlowformerConfig(**{name: 4})
    with pytest.raises(TypeError, match="did you mean 'hidden_size'"):
        FlowformerConfig(hiden_size=4)


def test_options_of_the_library_are_taken(tmp_path):
    labels = {0: "a", 1: "b", 2: "c"}
    config = FlowformerConfig(
        **SIZES, id2label=labels, dtype="float32", output_hidden_states=True, temperature=0.5, problem_type="regression"
    )
    config.architectures = ["FlowformerForCausalLM"]
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.id2label == labels
    assert loaded.output_hidden_states


def test_generation_after_dynamic_quantisation():
    quantization = pytest.importorskip("torch.ao.quantization")
    quantized = quantization.quantize_dynamic(language_model().float(), {nn.Linear}, dtype=torch.qint8)
    tokens = quantized.generate(PROMPTS, max_new_tokens=4, do_sample=False)
    assert torch.equal(tokens, quantized.generate(PROMPTS, max_new_tokens=4, do_sample=False, use_cache=False))


def test_continuous_batching_is_refused_with_a_reason():
    with pytest.raises(NotImplementedError, match="no place for the sums of Flow-Attention"):
        language_model().generate_batch([[3, 1, 4]], max_new_tokens=2)


def test_outputs_that_are_asked_for_in_the_call_or_in_the_config():
    for config, call in (({"output_attentions": True}, {}), ({}, {"output_attentions": True})):
        with pytest.warns(UserWarning, match="no matrix of attention weights"):
            assert language_model(**config)(PROMPTS, **call).attentions is None
    model = language_model(output_hidden_states=True)
    assert len(model(PROMPTS).hidden_states) == 3
    assert model(PROMPTS, output_hidden_states=False).hidden_states is None


LOAD = """
import sys
from transformers import AutoModel
def load():
    for folder in sys.argv[1:]:
        try:
            print(type(AutoModel.from_pretrained(folder)).__name__)
        except ValueError as error:
            print(repr(error))
load()
import flowformer.integrations.transformers
load()
"""


def test_a_fresh_process_loads_after_the_import(tmp_path):
    """transformers has no entry points: the import registers model type and attention.

    Without it, loading must fail; in particular a BERT with Flow-Attention must not be loaded with softmax.
    """
    language_model().save_pretrained(tmp_path / "flowformer")
    small = BertConfig(vocab_size=23, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
    bert = AutoModel.from_config(small, attn_implementation="flow_attention")
    bert.save_pretrained(tmp_path / "bert")
    command = [sys.executable, "-c", LOAD, str(tmp_path / "flowformer"), str(tmp_path / "bert")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    unknown_type, unknown_attention, *loaded = done.stdout.splitlines()
    assert "model type `flowformer`" in unknown_type
    assert unknown_attention.startswith("ValueError")
    assert "flow_attention" in unknown_attention
    assert loaded == ["FlowformerModel", "BertModel"]
    assert "import flowformer.integrations.transformers" in PAGE.read_text()


def test_peft_knows_the_layers_to_adapt():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(language_model().float(), peft.LoraConfig())
    adapted = {name.split(".")[-2] for name, _ in model.named_modules() if name.endswith("lora_A")}
    assert adapted == {"q_proj", "v_proj"}
    assert model(PROMPTS, labels=PROMPTS).loss.isfinite()
