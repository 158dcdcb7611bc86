"""PPO for robots: one value for each action chunk, and videos of some episodes.

    rollout ─┬► reward ─┐
       │     └► values ─┴► advantage ─► critic ─► update ─► checkpoint
       └─► videos

The reward is 1 on the chunk that solved the task. Each chunk has one advantage; discounts are
counted in control steps.
"""

from typing import Any, Final

from vla_rl.graph import Pipeline
from vla_rl.pipelines.embodied_grpo import with_videos
from vla_rl.pipelines.parts import Parts
from vla_rl.pipelines.ppo import ppo

READS: Final = ("reward", "critic", "run.videos_every")
SETTINGS: Final[dict[str, Any]] = {
    "advantage": {"name": "gae"},
    "reward": {"function": "success"},
    "critic": {"trunk": "shared"},
    "learner": {
        "loss": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28},
        "aggregation": "token_mean",
    },
}


def embodied_ppo(parts: Parts) -> Pipeline:
    """Build the pipeline of one update."""
    return with_videos(ppo(parts, "embodied_ppo", "PPO for vision-language-action policies"), parts)
