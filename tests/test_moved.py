"""Public names of the first release: each can still be imported, and where it has moved, a warning says where to."""

from __future__ import annotations

import importlib
import re
import warnings

import pytest

METHODS = "flowformer.train.methods"
MOVED = {
    "flowformer.baselines.offline_rl.AWAC": f"{METHODS}.awac.AWAC",
    "flowformer.baselines.offline_rl.BehaviourCloning": f"{METHODS}.behaviour_cloning.BehaviourCloning",
    "flowformer.baselines.offline_rl.DecisionTransformer": f"{METHODS}.decision_transformer.DecisionTransformer",
    "flowformer.baselines.offline_rl.LEARNERS": f"{METHODS}.policies.LEARNERS",
    "flowformer.baselines.offline_rl.Learner": f"{METHODS}.policies.Learner",
    "flowformer.baselines.offline_rl.MLPConfig": f"{METHODS}.mlp.MLPConfig",
    "flowformer.baselines.offline_rl.MLPPolicy": f"{METHODS}.mlp.MLPPolicy",
    "flowformer.baselines.offline_rl.Transitions": f"{METHODS}.awac.Transitions",
    "flowformer.baselines.offline_rl.policies": f"{METHODS}.policies.policies",
    "flowformer.baselines.offline_rl.policy": f"{METHODS}.policies.policy",
    "flowformer.baselines.tcn.CausalBlock": f"{METHODS}.tcn.CausalBlock",
    "flowformer.baselines.tcn.CausalConv": f"{METHODS}.tcn.CausalConv",
    "flowformer.baselines.tcn.TemporalEncoder": f"{METHODS}.tcn.TemporalEncoder",
    "flowformer.baselines.tcn.Triplet": f"{METHODS}.tcn.Triplet",
    "flowformer.baselines.tcn.draw_triplet": f"{METHODS}.tcn.draw_triplet",
    "flowformer.baselines.tcn.triplet_loss": f"{METHODS}.tcn.triplet_loss",
    "flowformer.baselines.timeseries.LSTMClassifier": f"{METHODS}.lstm.LSTMClassifier",
    "flowformer.baselines.timeseries.LSTMNetwork": f"{METHODS}.lstm.LSTMNetwork",
    "flowformer.baselines.timeseries.TCNClassifier": f"{METHODS}.tcn.TCNClassifier",
    "flowformer.baselines.timeseries.XGBoostClassifier": f"{METHODS}.xgboost.XGBoostClassifier",
    "flowformer.baselines.timeseries.classifier": f"{METHODS}.classifiers.classifier",
    "flowformer.baselines.timeseries.classifiers": f"{METHODS}.classifiers.classifiers",
    "flowformer.integrations.aeon.FlowformerClassifier": "flowformer.integrations.aeon.FlowformerTimeSeriesClassifier",
    "flowformer.integrations.aeon.FlowformerRegressor": "flowformer.integrations.aeon.FlowformerTimeSeriesRegressor",
    "flowformer.integrations.timm.FlowAttention": "flowformer.integrations.timm.TimmFlowAttention",
    "flowformer.nn.sinks_apart": "flowformer.nn.independent_sinks",
    **{f"flowformer.train.config.{name}": f"flowformer.train.overrides.{name}" for name in ("keys", "override")},
    "flowformer.train.methods.fit.configure": f"{METHODS}.config.configure",
    "flowformer.train.results.evaluate_run": "flowformer.train.evaluation.evaluate_run",
    **{
        f"flowformer.train.results.{name}": f"flowformer.train.figures.{name}"
        for name in ("draw_comparison", "draw_figures", "draw_maps", "draw_speeds")
    },
    **{f"flowformer.train.summary.{name}": f"flowformer.train.report.{name}" for name in ("markdown", "page", "write")},
    **{
        f"flowformer.integrations.timm.{model}": f"flowformer.integrations.timm.flowformer.{model}"
        for model in (
            "deit_base_flow_patch16_224",
            "deit_small_flow_patch16_224",
            "deit_tiny_flow_patch16_224",
            "flowformer_16heads_patch4_224",
            "flowformer_patch2_32",
            "flowformer_patch4_224",
        )
    },
}
STAYED = {
    "flowformer": "FlowAttention FlowMaps FlowMultiheadAttention FlowState FlowVariant baselines explain "
    "flow_attention flow_attention_recurrent flow_attention_varlen flow_maps nn ops replace_attention",
    "flowformer.baselines": "BigBirdAttention CosformerAttention DenseSynthesizerAttention GatedRFAAttention "
    "LinearAttention LinformerAttention LocalAttention LongformerAttention Mechanism NystromformerAttention "
    "PerformerAttention PerformerReluAttention RFAAttention ReformerAttention SinkhornAttention SoftAttention "
    "SoftmaxAttention SparseAttention SynthesizerAttention YosoAttention build capabilities get names options",
    "flowformer.data": "DamagedDataError DataInfo MissingDataError Splits collate listops load lra names offline_rl "
    "pathfinder prepare store text uea vision",
    "flowformer.integrations.gymnasium": "DecisionPolicy evaluate read_episodes",
    "flowformer.integrations.timm": "TimmFlowDeiT TimmFlowformer",
    "flowformer.integrations.transformers": "FlowCacheLayer FlowformerConfig FlowformerForCausalLM "
    "FlowformerForSequenceClassification FlowformerModel NAME flow_attention_forward flow_attention_mask",
    "flowformer.models": "ClassifierConfig Counts DecisionConfig DeiTConfig FlowformerClassifier FlowformerDecision "
    "FlowformerDeiT FlowformerLM FlowformerPairClassifier FlowformerTimeSeries FlowformerVision LMConfig "
    "TimeSeriesConfig VisionConfig count official",
    "flowformer.models.classifier": "ClassifierConfig FlowformerClassifier",
    "flowformer.models.counts": "count count_rival",
    "flowformer.models.decision": "DecisionConfig FlowformerDecision PRESETS",
    "flowformer.models.lm": "FlowformerLM LMConfig",
    "flowformer.models.timeseries": "FlowformerTimeSeries TimeSeriesConfig",
    "flowformer.models.vision": "FlowformerVision VisionConfig",
    "flowformer.nn": "FeedForward FlowAttention FlowDecoder FlowDecoderLayer FlowEncoder FlowEncoderLayer "
    "FlowMultiheadAttention LearnedPositions RivalAttention SinusoidalPositions build_attention is_flow record_maps "
    "replace_attention token_positions",
    "flowformer.ops": "FlowMaps FlowState FlowVariant explain flow_attention flow_attention_recurrent "
    "flow_attention_varlen flow_maps reference",
    "flowformer.viz": "over_images over_time speed_bars speed_curves speed_figure training_curves",
}


def imported(full_name):
    """What `from module import name` gives."""
    module, _, name = full_name.rpartition(".")
    found = importlib.import_module(module)
    try:
        return getattr(found, name)
    except AttributeError:
        return importlib.import_module(full_name)


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_a_name_that_moved_warns_and_is_the_new_one(old, new):
    with pytest.warns(DeprecationWarning, match=re.escape(f"{old} is now {new}.")):
        value = imported(old)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert imported(new) is value


@pytest.mark.parametrize("module", STAYED)
def test_other_names_are_where_they_were(module):
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        for name in STAYED[module].split():
            assert imported(f"{module}.{name}") is not None


@pytest.mark.parametrize("module", sorted({old.rpartition(".")[0] for old in MOVED}))
def test_an_unknown_name_is_an_attribute_error(module):
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
        _ = importlib.import_module(module).nothing
