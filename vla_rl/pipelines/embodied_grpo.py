"""GRPO for robots: 1 for a success and 0 for a failure, and videos of some episodes.

    rollout ─► reward ─► advantage ─► update ─► checkpoint
       ├────────────────────┴───────────┘
       └─► videos

As in SimpleVLA-RL (Li et al. 2025, arXiv:2509.09674): binary reward, clip-higher, no KL. Groups in
which all episodes succeed or all fail have no learning signal; `filter.accuracy_bounds` replaces
them.
"""

from typing import Any, Final

from vla_rl.graph import Pipeline
from vla_rl.pipelines.grpo import grpo
from vla_rl.pipelines.parts import Parts

READS: Final = ("reward", "run.videos_every")
SETTINGS: Final[dict[str, Any]] = {
    "advantage": {"name": "grpo"},
    "reward": {"function": "success"},
    "learner": {
        "loss": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28},
        "aggregation": "seq_mean_token_mean",
    },
}


def embodied_grpo(
    parts: Parts,
    id: str = "embodied_grpo",
    description: str = "GRPO for vision-language-action policies",
) -> Pipeline:
    """Build the pipeline of one update.

    `id` and `description` are for pipelines that build on it.
    """
    return with_videos(grpo(parts, id, description), parts)


def with_videos(pipeline: Pipeline, parts: Parts) -> Pipeline:
    """Add a node, off the critical path, that hands episodes to the video recorder.

    Return the same pipeline.
    """
    # off the critical path: nothing reads from it, so the update does not wait for ffmpeg
    return pipeline.add_node("videos", parts.show, reads=("update", "groups"))
