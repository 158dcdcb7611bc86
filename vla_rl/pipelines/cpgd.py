"""CPGD: clip log-probs instead of ratios, and penalise drift from the policy that acted.

    rollout ─► reward ─► advantage ─► update ─► checkpoint
       └────────────────────┴───────────┘

Liu et al. 2025, arXiv:2505.12504. The graph is GRPO's; the loss has no ratio whose variance could
explode, and the drift term pulls the policy back towards the one that acted. Other groups get more
weight for those without a learning signal.
"""

from typing import Any, Final

from vla_rl.graph import Pipeline
from vla_rl.pipelines.grpo import grpo
from vla_rl.pipelines.parts import Parts

READS: Final = ("reward",)
SETTINGS: Final[dict[str, Any]] = {
    "advantage": {"name": "cpgd_filter"},
    "learner": {"loss": {"name": "cpgd"}, "aggregation": "seq_mean_token_mean"},
}


def cpgd(parts: Parts) -> Pipeline:
    """Build the pipeline of one update."""
    loss = parts.config.learner.loss
    loss.require(
        loss.name == "cpgd",
        "name",
        "'cpgd' in the pipeline cpgd; leave it out on the command line, or use "
        '`with_pipeline(config, "cpgd")` in Python',
    )
    # the drift is in the loss, so the graph is that of GRPO
    return grpo(parts, "cpgd", "Clipped policy gradient with policy drift")
