"""PPO: a critic estimates the expected return and is fitted to the observed one.

    rollout ─┬► reward ─┐
             └► values ─┴► advantage ─► critic ─► update ─► checkpoint
                              (GAE)       └── returns

Schulman et al. 2017, arXiv:1707.06347, and 2015, arXiv:1506.02438. An episode that the task ended
has no further value; one that a time limit truncated is bootstrapped with the value of its last
observation. Values are computed group by group while other groups still run. The critic learns
before the policy, and once from each update: if a run is stopped between the two, a resume does not
train the critic on that update again.
"""

from typing import Any, Final

from vla_rl.graph import Node, NodeRole, NodeType, Pipeline
from vla_rl.pipelines.grpo import grpo
from vla_rl.pipelines.nodes.advantages import CriticAdvantage
from vla_rl.pipelines.nodes.run_parts import EstimateValues, TrainCritic
from vla_rl.pipelines.parts import Parts

READS: Final = ("reward", "critic")
SETTINGS: Final[dict[str, Any]] = {
    "advantage": {"name": "gae"},
    "learner": {
        "loss": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": "token_mean",
    },
}


def ppo(
    parts: Parts, id: str = "ppo", description: str = "Proximal policy optimization"
) -> Pipeline:
    """Build the pipeline of one update.

    `id` and `description` are for pipelines that build on it.
    """
    advantage = parts.config.advantage
    advantage.require(
        advantage.needs_values,
        "name",
        f"'gae' or 'marft_gae' in the pipeline {id}, which use the critic's values; leave it out on the command "
        f'line, or use `with_pipeline(config, "{id}")` in Python',
    )
    critic = Node.declare(
        "critic",
        TrainCritic(parts.critic),
        reads=("update", "groups", "values", "returns"),
        node_type=NodeType.MODEL_TRAIN,
        node_role=NodeRole.CRITIC,
        resources="device",
    )
    pipeline = grpo(parts, id, description)
    # its own reads, not "rewards" by name: a penalty between reward and advantage has rerouted them
    reads = {**pipeline.node("advantage").reads, "values": "values"}
    return (
        pipeline.add_node(
            "values",
            EstimateValues(parts.critic),
            reads={"group": "groups"},
            writes="values",
            stream=True,
            node_type=NodeType.MODEL_INFERENCE,
            node_role=NodeRole.CRITIC,
        )
        .replace_node(
            "advantage",
            CriticAdvantage(advantage),
            reads=reads,
            writes=("advantages", "returns"),
        )
        .insert_after("advantage", critic)
    )
