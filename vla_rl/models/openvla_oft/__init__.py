"""OpenVLA-OFT: fused vision towers, a bidirectional Llama, a whole chunk in one forward pass, as
tokens or as numbers.

The configuration imports fast; torch, timm and transformers are imported when a policy is first
used.
"""

from typing import TYPE_CHECKING

from vla_rl.models.prismatic.action_tokens import (
    ActionBounds as ActionBounds,
    ActionTokenizer as ActionTokenizer,
    unit_bounds as unit_bounds,
)
from vla_rl.models.prismatic.config import (
    LIBERO_PROPRIO as LIBERO_PROPRIO,
    LlmConfig as LlmConfig,
    OpenVlaOftConfig as OpenVlaOftConfig,
    ProprioConfig as ProprioConfig,
    VisionTowerConfig as VisionTowerConfig,
    tiny as tiny,
)
from vla_rl.models.prismatic.conventions import CONVENTIONS as CONVENTIONS
from vla_rl.util.imports import lazy_names

if TYPE_CHECKING:
    from vla_rl.models.openvla_oft.policy import (
        ContinuousOpenVlaOft as ContinuousOpenVlaOft,
        OpenVlaOft as OpenVlaOft,
    )


__getattr__, __dir__ = lazy_names(__name__)
