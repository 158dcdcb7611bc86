"""pi-StepNFT for flow policies: good decisions pull the flow towards what they reached, bad ones push it away.

    rollout ─► reward ─► advantage ─► update ─► checkpoint
       ├────────────────────┴───────────┘
       └─► videos

The graph is that of embodied_grpo, with a loss that needs no likelihood
(`vla_rl.algorithms.losses.policy.nft`). An advantage, cut at `learner.loss.max_advantage`, says how good a
decision was, from 0 to 1.
"""

from typing import Any, Final

from vla_rl.graph import Pipeline
from vla_rl.pipelines.embodied_grpo import embodied_grpo
from vla_rl.pipelines.parts import Parts

READS: Final = ("reward", "run.videos_every")
SETTINGS: Final[dict[str, Any]] = {
    "advantage": {"name": "grpo"},
    "reward": {"function": "success"},
    "learner": {"loss": {"name": "nft"}, "aggregation": "token_mean"},
}


def nft(parts: Parts) -> Pipeline:
    """Build the pipeline of one update."""
    return embodied_grpo(parts, "nft", "pi-StepNFT for flow policies")
