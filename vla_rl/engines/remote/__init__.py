"""Replies from model servers that run elsewhere: vLLM's own HTTP server, and SGLang's.

    RemoteChatEngine ─► ModelServer ══ HTTP ══► server        as many servers as configured
        │                   ▲ VllmServer, SglangServer
        └─ adopt ─► checkpoint folder ─────────► loaded by each server from disk

server      a server as the engine sees it: requests, weights, health, and its loss
vllm_server, sglang_server      what each of them calls things

Importing the config imports neither torch nor aiohttp.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vla_rl.engines.remote.config import RemoteConfig

if TYPE_CHECKING:
    from vla_rl.engines.remote.engine import RemoteChatEngine

__all__ = ["RemoteChatEngine", "RemoteConfig"]


def __getattr__(name: str) -> Any:
    if name == "RemoteChatEngine":
        return import_module(f"{__name__}.engine").RemoteChatEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
