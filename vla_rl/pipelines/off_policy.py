"""Off-policy learning: every episode is stored, and a head over a frozen policy learns from all of them.

    rollout ─► reward ─► decision_rewards ─► update ─► checkpoint
       ├────────────────────┴────────────────┘
       └─► videos

The update stores the episodes, synced, before its gradient steps; only then they count as learnt. The
learner is `vla_rl.learner.off_policy`, whatever `off_policy.algorithm` says.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from vla_rl.graph import NodeRole, NodeType, Pipeline
from vla_rl.pipelines.embodied_grpo import with_videos
from vla_rl.pipelines.nodes.rewards import GroupReward, WrittenRewards, rewards_by_group
from vla_rl.pipelines.parts import Parts
from vla_rl.replay import ReplayState
from vla_rl.types import Group

READS: Final = ("reward", "run.videos_every", "off_policy", "replay")
SETTINGS: Final[dict[str, Any]] = {
    # one episode from each start: nothing is compared within a group
    "group_size": 1,
    "advantage": {"name": "reinforce_plus_plus"},
    "reward": {"function": "success"},
}


async def decision_rewards(groups: Sequence[Group], rewards: WrittenRewards) -> list[np.ndarray]:
    """Return float32 [decisions] for each episode of all groups, in order."""
    return [reward for of_group in rewards_by_group(groups, rewards) for reward in of_group]


def off_policy(parts: Parts) -> Pipeline:
    """Build the pipeline of one update."""
    parts.remember("replay", parts.replay, ReplayState)
    pipeline = (
        Pipeline("off_policy", "Off-policy learning over a frozen policy", inputs="update")
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
            GroupReward(parts.config.reward),
            reads={"group": "groups"},
            writes="rewards",
            stream=True,
            node_role=NodeRole.REWARD,
        )
        .add_node(
            "decision_rewards",
            decision_rewards,
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
    return with_videos(pipeline, parts)
