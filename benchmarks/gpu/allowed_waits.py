"""Places at which the host may wait for a GPU, each with its reason. This list may only shrink:
`tests/devices` fails for a wait that it lacks, and for an entry that no path needs any more.
"""

from types import MappingProxyType
from typing import Final

ALLOWED: Final = MappingProxyType(
    {
        "engines/device_lane.py:to_host": "the one copy of a decision, a token of a reply, or the "
        "sums of an optimizer step; how often is held by budgets",
        "learner/optimizer.py:step": "the gradient's norm decides about a skip; imitation and the "
        "critic read it here, the learner with its metrics",
        "learner/backend.py:_total": "the loss of an update of imitation, once",
        "learner/imitation.py:_greedy": "evaluation hands actions to NumPy, once a batch",
        "learner/backend.py:_copied": "weights and optimizer state for a checkpoint, between two "
        "updates",
        "models/prismatic/trunk.py:require_bidirectional": "once in a network's life, before its first "
        "decision: a causal trunk costs tens of points without an error",
        "models/trajectory_encoders.py:_run_tower": "an embedding's numbers, once for 32 frames",
        "models/vjepa2.py:_move": "the encoder's weights, at the first embedding, or at "
        "each if they are offloaded",
        "models/vjepa2.py:_embed": "an embedding's numbers, once a batch of videos",
    }
)
"""Reasons by place: file in `vla_rl` and function."""
