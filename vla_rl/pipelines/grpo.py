"""GRPO: compare the episodes of a group with each other, without a critic.

    rollout ─► reward ─► advantage ─► update ─► checkpoint
       └────────────────────┴───────────┘

Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300. Rewards are computed group by group while other
groups still run. If `learner.loss.kl.coef` is above 0, the graph has a node `reference` beside
`reward`; at 0 there is no reference policy.
"""

from typing import Any, Final

from vla_rl.graph import NodeRole, NodeType, Pipeline
from vla_rl.pipelines.kl import with_kl
from vla_rl.pipelines.nodes.advantages import GroupAdvantage
from vla_rl.pipelines.nodes.rewards import GroupReward
from vla_rl.pipelines.parts import Parts

READS: Final = ("reward",)
SETTINGS: Final[dict[str, Any]] = {
    "advantage": {"name": "grpo"},
    "learner": {"loss": {"name": "ppo"}, "aggregation": "seq_mean_token_mean"},
}


def grpo(
    parts: Parts, id: str = "grpo", description: str = "Group relative policy optimization"
) -> Pipeline:
    """Build the pipeline of one update.

    `id` and `description` are for pipelines that build on it.
    """
    config = parts.config
    pipeline = (
        Pipeline(id, description, inputs="update")
        .add_node(
            "rollout",
            parts.collect,
            reads="update",
            writes="groups",
            node_type=NodeType.ENV_INTERACT,
            node_role=NodeRole.ROLLOUT,
        )
        .add_node(
            "reward",
            GroupReward(config.reward),
            reads={"group": "groups"},
            writes="rewards",
            stream=True,
            node_role=NodeRole.REWARD,
        )
        .add_node(
            "advantage",
            GroupAdvantage(config.advantage),
            reads=("groups", "rewards"),
            writes="advantages",
            node_role=NodeRole.ADVANTAGE,
        )
        .add_node(
            "update",
            parts.learn,
            reads=("groups", "advantages"),
            writes="snapshot",
            node_type=NodeType.MODEL_TRAIN,
            node_role=NodeRole.ACTOR,
            resources="device",
        )
        .add_node("checkpoint", parts.save, reads="snapshot")
    )
    return with_kl(pipeline, parts)
