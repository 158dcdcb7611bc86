"""OpenVLA: fused vision towers and a causal Llama that speaks one action token after the other.

Configs import in an instant; `OpenVla` itself brings torch, timm and transformers, when it is first asked for.
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
