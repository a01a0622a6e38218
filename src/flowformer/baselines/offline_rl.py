"""Moved to `flowformer.train.methods`, since the policies are no attentions; the old imports still work."""

from .._utils import names_from

__getattr__ = names_from(
    __name__,
    {
        "flowformer.train.methods.awac": ("AWAC", "Transitions"),
        "flowformer.train.methods.behaviour_cloning": ("BehaviourCloning",),
        "flowformer.train.methods.decision_transformer": ("DecisionTransformer",),
        "flowformer.train.methods.mlp": ("MLPConfig", "MLPPolicy"),
        "flowformer.train.methods.policies": ("LEARNERS", "Learner", "policies", "policy"),
    },
)
