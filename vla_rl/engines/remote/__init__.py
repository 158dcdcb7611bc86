"""Replies from model servers that run elsewhere: vLLM's own HTTP server, and SGLang's.

    RemoteChatEngine ─► ServerPool ─► ModelServer ══ HTTP ══► server        as many servers as configured
        │                                 ▲ VllmServer, SglangServer
        └─ adopt ─► checkpoint folder ───────────────────────► loaded by each server from disk

server_pool      which servers take requests, with which weights, and what happens to a lost one
server_weights   each version as a folder, and the log-probs by which a server shows that it has it
server           one server: requests, weights, health, its loss
vllm_server, sglang_server      what each of them calls things

Importing the config imports neither torch nor aiohttp.
"""

from typing import TYPE_CHECKING

from vla_rl.engines.remote.config import RemoteConfig as RemoteConfig
from vla_rl.util.lazy_names import lazy_names

if TYPE_CHECKING:
    from vla_rl.engines.remote.engine import RemoteChatEngine as RemoteChatEngine


__getattr__, __dir__ = lazy_names(__name__)
