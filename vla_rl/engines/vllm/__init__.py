"""vLLM as an engine: the same `act` and `generate` as the in-process torch engine, computed in
separate processes.

    VllmEngine ─► replica ─► AsyncLLM ══ ZeroMQ ══► engine process     as many replicas as configured
        │                                               ▲
        └─ publish ─► staging (memory of both) ─────────┘ weights, applied to every replica or to none

adapter     the only module that imports vllm, and the versions that it supports
served      methods that the engine needs from a policy family; `vla_rl.models.serving` implements
            them for the families here
transfer    the engine process's side of a weight update

Importing the config does not import torch; the other names do, and opening an engine imports vLLM.
"""

from typing import TYPE_CHECKING, Any

from vla_rl.engines.vllm.config import VllmConfig

if TYPE_CHECKING:
    from vla_rl.engines.vllm.engine import VllmEngine

__all__ = ["VllmConfig", "VllmEngine"]


def __getattr__(name: str) -> Any:
    if name == "VllmEngine":
        from vla_rl.engines.vllm.engine import VllmEngine

        return VllmEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
