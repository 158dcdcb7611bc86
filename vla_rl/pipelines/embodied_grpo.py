"""GRPO for robots: 1 for a success and 0 for a failure, and videos of some episodes.

    rollout ─► reward ─► advantage ─► update ─► checkpoint
       ├────────────────────┴───────────┘
       └─► videos

As SimpleVLA-RL (Li et al. 2025, arXiv:2509.09674) trains: binary reward, clip-higher, no KL. Groups in which all succeed or
all fail teach nothing; `filter.accuracy_bounds` replaces them.
"""

from typing import Any, Final

from vla_rl.graph import Pipeline
from vla_rl.pipelines.grpo import grpo
from vla_rl.pipelines.parts import Parts

SETTINGS: Final[dict[str, Any]] = {
    "advantage": {"name": "grpo"},
    "reward": {"function": "success"},
    "learner": {
        "loss": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28},
        "aggregation": "seq_mean_token_mean",
    },
}


def embodied_grpo(
    parts: Parts, id: str = "embodied_grpo", description: str = "GRPO for vision-language-action policies"
) -> Pipeline:
    """The pipeline of one update; `id` and `description` are for those who build on it."""
    return with_videos(grpo(parts, id, description), parts)


def with_videos(pipeline: Pipeline, parts: Parts) -> Pipeline:
    """With a node that hands episodes to the video recorder, off the critical path; changed in place."""
    return pipeline.add_node("videos", parts.show, reads=("update", "groups"))
