"""vLLM as an engine: what this process's engines give, computed in separate processes.

    VllmActionEngine, VllmChatEngine      the two kinds of engine, over the processes of a `VllmEngine`
        │
    VllmEngine ─► replica ─► AsyncLLM ══ ZeroMQ ══► engine process     as many replicas as configured
        │                                               ▲
        └─ publish ─► staging (memory of both) ─────────┘ weights, applied to every replica or to none

adapter     the only module that imports vllm, and the versions that it supports
served      methods that the engine needs from a policy family; `vla_rl.models.vllm` implements
            them for the families here
transfer    the engine process's side of a weight update

Importing the config does not import torch; the other names do, and opening an engine imports vLLM.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vla_rl.engines.vllm.config import VllmConfig as VllmConfig
from vla_rl.util.lazy_names import lazy_names

if TYPE_CHECKING:
    from vla_rl.engines.config import EngineConfig as EngineConfig
    from vla_rl.engines.device_lane import DeviceLane as DeviceLane
    from vla_rl.engines.vllm.action_engine import VllmActionEngine as VllmActionEngine
    from vla_rl.engines.vllm.chat_engine import VllmChatEngine as VllmChatEngine
    from vla_rl.engines.vllm.engine import VllmEngine as VllmEngine
    from vla_rl.engines.vllm.served import (
        ServedActions as ServedActions,
        ServedLanguage as ServedLanguage,
    )


__getattr__, __dir__ = lazy_names(__name__)


def make_vllm_engine(
    served: "ServedActions | ServedLanguage",
    lane: "DeviceLane",
    config: "EngineConfig",
    weight_version: int = 0,
    gpus: Sequence[str] = (),
) -> "VllmActionEngine | VllmChatEngine":
    """Make the engine that suits a policy whose kind is not known before."""
    engine: VllmActionEngine | VllmChatEngine = engine_class(served)(
        served, lane, config, weight_version, gpus
    )
    return engine


def engine_class(served: "ServedActions | ServedLanguage") -> type[Any]:
    """Return the class of engine that suits a policy: one that ends its own replies chats."""
    kind = "VllmChatEngine" if served.layout.num_tokens is None else "VllmActionEngine"
    found: type[Any] = __getattr__(kind)
    return found
