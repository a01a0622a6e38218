"""Deprecation shim, no code: AWAC, behaviour cloning and the Decision Transformer are in `flowformer.train.methods`."""

from .._utils import moved

__getattr__ = moved(
    __name__,
    {
        "AWAC": "flowformer.train.methods.awac.AWAC",
        "Transitions": "flowformer.train.methods.awac.Transitions",
        "BehaviourCloning": "flowformer.train.methods.behaviour_cloning.BehaviourCloning",
        "DecisionTransformer": "flowformer.train.methods.decision_transformer.DecisionTransformer",
        "MLPConfig": "flowformer.train.methods.mlp.MLPConfig",
        "MLPPolicy": "flowformer.train.methods.mlp.MLPPolicy",
        "LEARNERS": "flowformer.train.methods.policies.LEARNERS",
        "Learner": "flowformer.train.methods.policies.Learner",
        "policies": "flowformer.train.methods.policies.policies",
        "policy": "flowformer.train.methods.policies.policy",
    },
)
