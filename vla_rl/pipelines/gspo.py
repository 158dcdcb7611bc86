"""GSPO: clip the ratio of whole episodes instead of tokens.

    rollout ─► reward ─► advantage ─► update ─► checkpoint
       └────────────────────┴───────────┘

Zheng et al. 2025, arXiv:2507.18071. The graph is GRPO's; the loss clips the length-normalised ratio
of each whole episode, to a very narrow range. An episode can span several micro-batches, so the
learner computes its ratio before each step.
"""

from typing import Any, Final

from vla_rl.graph import Pipeline
from vla_rl.pipelines.grpo import grpo
from vla_rl.pipelines.parts import Parts

READS: Final = ("reward",)
SETTINGS: Final[dict[str, Any]] = {
    "advantage": {"name": "grpo"},
    "learner": {"loss": {"name": "gspo"}, "aggregation": "seq_mean_token_mean"},
}


def gspo(parts: Parts) -> Pipeline:
    """Build the pipeline of one update."""
    loss = parts.config.learner.loss
    loss.require(
        loss.name == "gspo",
        "name",
        "'gspo' in the pipeline gspo; leave it out on the command line, or use "
        '`with_pipeline(config, "gspo")` in Python',
    )
    return grpo(parts, "gspo", "Group sequence policy optimization")
