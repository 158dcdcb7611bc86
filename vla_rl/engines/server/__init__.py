"""Replies from model servers that run elsewhere: vLLM's own HTTP server, and SGLang's.

    ServerChatEngine ─► ServerPool ─► ModelServer ══ HTTP ══► server        as many servers as configured
        │                                 ▲ VllmServer, SglangServer
        └─ checkpoint folder of a version ──────────────────► loaded by each server from disk

pool      which servers take requests, with which weights, and what happens to a lost one
servers   one server: requests, weights, health, its loss, as vLLM and as SGLang call them

Importing the config imports neither torch nor aiohttp.
"""

from typing import TYPE_CHECKING

from vla_rl.engines.config import ModelServerConfig as ModelServerConfig
from vla_rl.util.imports import lazy_names

if TYPE_CHECKING:
    from vla_rl.engines.server.engine import ServerChatEngine as ServerChatEngine


__getattr__, __dir__ = lazy_names(__name__)
