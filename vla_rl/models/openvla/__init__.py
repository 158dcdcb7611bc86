"""OpenVLA: fused vision towers and a causal Llama that generates one action token after the other.

The configuration imports fast; torch, timm and transformers are imported when `OpenVla` is first
used.
"""

from typing import TYPE_CHECKING, Any

from vla_rl.models.openvla.config import OpenVlaConfig

if TYPE_CHECKING:
    from vla_rl.models.openvla.policy import OpenVla

__all__ = ["OpenVla", "OpenVlaConfig"]


def __getattr__(name: str) -> Any:
    if name == "OpenVla":
        from vla_rl.models.openvla.policy import OpenVla

        return OpenVla
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
