"""OpenVLA: fused vision towers and a causal Llama that generates one action token after the other.

The configuration imports fast; torch, timm and transformers are imported when `OpenVla` is first
used.
"""

from typing import TYPE_CHECKING

from vla_rl.models.openvla.config import OpenVlaConfig as OpenVlaConfig
from vla_rl.util.imports import lazy_names

if TYPE_CHECKING:
    from vla_rl.models.openvla.policy import OpenVla as OpenVla


__getattr__, __dir__ = lazy_names(__name__)
