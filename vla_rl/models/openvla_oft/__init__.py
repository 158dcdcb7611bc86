"""OpenVLA-OFT: fused vision towers, a bidirectional Llama, a whole chunk in one forward pass, as
tokens or as numbers.

The configuration imports fast; torch, timm and transformers are imported when a policy is first
used.
"""

from typing import TYPE_CHECKING

from vla_rl.models.openvla_oft.config import OpenVlaOftConfig as OpenVlaOftConfig, tiny as tiny
from vla_rl.models.prismatic.action_tokens import (
    LIBERO_BOUNDS as LIBERO_BOUNDS,
    ActionBounds as ActionBounds,
    ActionTokenizer as ActionTokenizer,
    unit_bounds as unit_bounds,
)
from vla_rl.models.prismatic.config import (
    LIBERO_PROPRIO as LIBERO_PROPRIO,
    LlmConfig as LlmConfig,
    ProprioConfig as ProprioConfig,
    VisionTowerConfig as VisionTowerConfig,
)
from vla_rl.models.prismatic.dialects import DIALECTS as DIALECTS
from vla_rl.util.imports import lazy_names

if TYPE_CHECKING:
    from vla_rl.models.openvla_oft.continuous import ContinuousOpenVlaOft as ContinuousOpenVlaOft
    from vla_rl.models.openvla_oft.policy import OpenVlaOft as OpenVlaOft


__getattr__, __dir__ = lazy_names(__name__)
