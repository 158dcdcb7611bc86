"""OpenVLA-OFT: fused vision towers, a bidirectional Llama, a whole chunk in one forward pass, as
tokens or as numbers.

The configuration imports fast; torch, timm and transformers are imported when a policy is first
used.
"""

from typing import TYPE_CHECKING

from vla_rl.lazy_names import lazy_names
from vla_rl.models.openvla_oft.config import OpenVlaOftConfig, tiny
from vla_rl.models.prismatic.action_tokens import (
    LIBERO_BOUNDS,
    ActionBounds,
    ActionTokenizer,
    unit_bounds,
)
from vla_rl.models.prismatic.config import (
    LIBERO_PROPRIO,
    LlmConfig,
    ProprioConfig,
    VisionTowerConfig,
)
from vla_rl.models.prismatic.dialects import DIALECTS

if TYPE_CHECKING:
    from vla_rl.models.openvla_oft.continuous import ContinuousOpenVlaOft
    from vla_rl.models.openvla_oft.policy import OpenVlaOft

__all__ = [
    "DIALECTS",
    "LIBERO_BOUNDS",
    "LIBERO_PROPRIO",
    "ActionBounds",
    "ActionTokenizer",
    "ContinuousOpenVlaOft",
    "LlmConfig",
    "OpenVlaOft",
    "OpenVlaOftConfig",
    "ProprioConfig",
    "VisionTowerConfig",
    "tiny",
    "unit_bounds",
]

__getattr__, __dir__ = lazy_names(
    __name__, {"continuous": ("ContinuousOpenVlaOft",), "policy": ("OpenVlaOft",)}
)
