"""GRPO: compare the episodes of a group with each other, without a critic.

    rollout ─► reward ─► advantage ─► update ─► checkpoint
       └────────────────────┴───────────┘

Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300. Rewards are computed group by group while other
groups still run.

With a weight above 0 there is a reference policy, in any pipeline: a term of the loss, or a penalty on
the reward.

    rollout ─► reference ─┬─► update               learner.loss.kl.coef > 0
                          └─► kl ─► advantage      kl_in_reward.coef > 0: the reward node's output minus the distance
"""

from typing import Any, Final

from vla_rl.graph import Node, NodeRole, NodeType, Pipeline
from vla_rl.pipelines.nodes.advantages import GroupAdvantage, KlCoefficient, KlPenalty
from vla_rl.pipelines.nodes.rewards import GroupReward
from vla_rl.pipelines.nodes.run_parts import ReferenceLogProbs
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


def with_kl(pipeline: Pipeline, parts: Parts) -> Pipeline:
    """Add the nodes of the reference policy that the configuration asks for.

    Return the same pipeline.
    """
    in_loss, in_reward = (
        parts.config.learner.loss.needs_reference,
        parts.config.kl_in_reward.coef > 0.0,
    )
    if not (in_loss or in_reward):
        return pipeline
    pipeline.add_node(
        "reference",
        ReferenceLogProbs(parts.reference),
        reads={"group": "groups"},
        writes="reference_log_probs",
        stream=True,
        node_type=NodeType.MODEL_INFERENCE,
        node_role=NodeRole.REFERENCE,
    )
    if in_loss:
        wanted = {**pipeline.node("update").reads, "reference_log_probs": "reference_log_probs"}
        pipeline.replace_node("update", reads=wanted)
    if in_reward:
        penalty = KlPenalty(parts.config.kl_in_reward, parts.config.scheduler.max_staleness)
        parts.remember("kl_in_reward", penalty, KlCoefficient)
        reads = ("update", "groups", "rewards", "reference_log_probs")
        node = Node.declare(
            "kl", penalty, reads=reads, writes="rewards_less_kl", node_role=NodeRole.REWARD
        )
        pipeline.insert_after("reward", node, reroute={"rewards": "rewards_less_kl"})
    return pipeline
