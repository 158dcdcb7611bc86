"""vLLM as an engine: what this process's engines give, computed in separate processes.

    VllmActionEngine, VllmChatEngine      the two kinds of engine, over the processes of a `VllmEngine`
        │
    VllmEngine ─► replica ─► AsyncLLM ══ ZeroMQ ══► engine process     as many replicas as configured
        │                                               ▲
        └─ publish ─► staging (memory of both) ─────────┘ weights, applied to every replica or to none

engine, engine_kinds   one policy's engines; the methods that episodes call
pool, replica, process     engines kept running, one engine, its processes
publication, staging       new weights, in memory that engine processes open
worker_extension           our code inside those processes
served, launch             what is needed of a policy family (`vla_rl.models.vllm` implements it for the
                           families here), and what an engine is started with
adapter                    the only module that imports vllm, and the versions that it supports

Importing the config does not import torch; the other names do, and opening an engine imports vLLM.
"""

from typing import TYPE_CHECKING

from vla_rl.engines.config import VllmConfig as VllmConfig
from vla_rl.util.imports import lazy_names

if TYPE_CHECKING:
    from vla_rl.engines.vllm.engine import VllmEngine as VllmEngine
    from vla_rl.engines.vllm.engine_kinds import (
        VllmActionEngine as VllmActionEngine,
        VllmChatEngine as VllmChatEngine,
        make_vllm_engine as make_vllm_engine,
    )

__getattr__, __dir__ = lazy_names(__name__)
