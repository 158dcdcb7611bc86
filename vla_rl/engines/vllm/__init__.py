"""vLLM as a generation engine: the same `act` and `generate` as the in-process torch engine, in processes of its own.

    VllmEngine ─► replica ─► AsyncLLM ══ ZeroMQ ══► engine process     as many replicas as configured
        │                                               ▲
        └─ publish ─► staging (memory of both) ─────────┘ weights, applied to every replica or to none

adapter     the only importer of vllm, and the versions it was written for
served      what the engine needs of a policy family; `vla_rl.models.serving` has it for the families here
transfer    the engine process's side of a weight update

The config imports in an instant; the rest brings torch, and vLLM when an engine is opened.
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
