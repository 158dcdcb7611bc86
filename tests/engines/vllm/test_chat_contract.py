"""vLLM keeps the rules of every engine that generates replies."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from small_policies import completing_policy

from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.engines.vllm import VllmChatEngine
from vla_rl.models.language import CausalLanguageModel
from vla_rl.models.vllm import serve
from vla_rl.testing import ChatEngineContract

pytestmark = [
    pytest.mark.needs_vllm,
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]


class TestVllmChatEngine(ChatEngineContract):
    def make_policy(self) -> CausalLanguageModel:
        return completing_policy()

    @asynccontextmanager
    async def open_engine(self) -> AsyncIterator[VllmChatEngine]:
        config = EngineConfig(max_reply=self.max_reply)
        async with (
            DeviceLane(1) as lane,
            VllmChatEngine(serve(self.make_policy()), lane, config) as engine,
        ):
            yield engine
