"""DAPO: GRPO with four changes, three of them settings and one a node.

    rollout ─► reward ─► overlong ─► advantage ─► update ─► checkpoint
       └─────────────────────────────────┴──────────┘

Yu et al. 2025, arXiv:2503.14476: clip-higher (section 3.1), dynamic sampling (3.2: groups whose
episodes all earned the same are replaced with new ones during the rollout), the mean over tokens
(3.3), the overlong penalty (3.4).
"""

from typing import Any, Final

from vla_rl.graph import Node, NodeRole, Pipeline
from vla_rl.pipelines.grpo import grpo
from vla_rl.pipelines.nodes.advantages import OverlongPenalty
from vla_rl.pipelines.parts import Parts

READS: Final = ("reward", "overlong")
SETTINGS: Final[dict[str, Any]] = {
    "advantage": {"name": "grpo"},
    "filter": {"drop_equal": "return"},
    "learner": {
        "loss": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28},
        "aggregation": "token_mean",
    },
}


def dapo(parts: Parts) -> Pipeline:
    """Build the pipeline of one update."""
    config = parts.config
    config.filter.require(
        config.filter.drop_equal != "none",
        "drop_equal",
        "'return' or 'success', which is DAPO's dynamic sampling",
    )
    pipeline = grpo(parts, "dapo", "Decoupled clip and dynamic sampling policy optimization")
    overlong = Node.declare(
        "overlong",
        OverlongPenalty(config.overlong),
        reads=("groups", "rewards"),
        writes="shaped",
        node_role=NodeRole.REWARD,
    )
    # after the reward and not in it, so that a reward function of one's own is penalised too
    return pipeline.insert_after("reward", overlong, reroute={"rewards": "shaped"})
