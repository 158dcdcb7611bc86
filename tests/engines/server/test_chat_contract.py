"""Servers elsewhere keep the rules of every engine that generates replies."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from model_servers import FakeSglang, FakeVllm, Server, serving
from small_policies import completing_policy

from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.engines.server import ModelServerConfig, ServerChatEngine
from vla_rl.models.language import CausalLanguageModel
from vla_rl.models.vllm import serve
from vla_rl.testing import ChatEngineContract


class OfServers(ChatEngineContract):
    """What both kinds of server share."""

    server: ClassVar[type[Server]]
    api: ClassVar[Any]

    def make_policy(self) -> CausalLanguageModel:
        return completing_policy()

    @asynccontextmanager
    async def open_engine(self) -> AsyncIterator[ServerChatEngine]:
        server = self.server(completing_policy(7))  # the engine gives it the weights
        async with serving(server), DeviceLane(1) as lane:
            settings = ModelServerConfig(urls=(server.url,), api=self.api, health_every_s=3600.0)
            config = EngineConfig(kind="server", max_reply=self.max_reply, server=settings)
            async with ServerChatEngine(serve(self.make_policy()), lane, config) as engine:
                yield engine


class TestVllmServer(OfServers):
    server, api = FakeVllm, "vllm"


class TestSglangServer(OfServers):
    server, api = FakeSglang, "sglang"
