"""The reference policy in any pipeline: a term of the loss, or a penalty on the reward.

Without a weight above 0 there is none.

rollout ─► reference ─┬─► update               learner.loss.kl.coef > 0
                      └─► kl ─► advantage      kl_in_reward.coef > 0: the reward node's output minus the distance
"""

from vla_rl.graph import Node, NodeRole, NodeType, Pipeline
from vla_rl.pipelines.nodes.advantages import KlCoefficient, KlPenalty
from vla_rl.pipelines.nodes.run_parts import ReferenceLogProbs
from vla_rl.pipelines.parts import Parts


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
