"""Policies, engines and actors of the package keep the rules of `vla_rl.testing`.

tests/engines/vllm holds vLLM's engines to the same ones.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from drawing_policy import make_drawing_policy
from sample_actors import Counter, Streamer
from small_policies import completing_policy, observe, oft_policy, token_policy

from vla_rl.actors import ChildProcess, ForkServer
from vla_rl.cluster.hosts import HostMonitor
from vla_rl.engines import (
    DeviceLane,
    EngineConfig,
    PolicyModel,
    TorchActionEngine,
    TorchChatEngine,
)
from vla_rl.env_workers.worker import EnvWorker
from vla_rl.models.language import CausalLanguageModel
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.models.openvla_oft import ContinuousOpenVlaOft, tiny
from vla_rl.remote_rollout.image_cache import ImageCache
from vla_rl.testing import ActionEngineContract, ActorContract, ChatEngineContract, PolicyContract
from vla_rl.types import EnvSpec, Observation


class TestMlp(PolicyContract):
    def make_policy(self) -> PolicyModel[Any]:
        shape = MlpConfig(
            state_size=3, action_low=(-2.0, 0.0), action_high=(2.0, 1.0), num_bins=5, chunk_size=2
        )
        return MlpPolicy.create(shape, seed=0)

    def make_observations(self) -> list[Observation]:
        rng = np.random.default_rng(0)
        return [{"state": rng.normal(size=3).astype(np.float32)} for _ in range(6)]


class TestAPolicyThatDrawsMoreThanTokens(PolicyContract):
    greedy_has_noise = True

    def make_policy(self) -> PolicyModel[Any]:
        return make_drawing_policy()

    def make_observations(self) -> list[Observation]:
        return [{"state": np.array([number, -1.0], np.float32)} for number in range(5)]


class OfImages(PolicyContract):
    def make_observations(self) -> list[Observation]:
        return [observe(seed) for seed in range(3)]


class TestOpenVla(OfImages):
    def make_policy(self) -> PolicyModel[Any]:
        return token_policy()


class TestOpenVlaOft(OfImages):
    def make_policy(self) -> PolicyModel[Any]:
        return oft_policy()


class TestContinuousOpenVlaOft(OfImages):
    def make_policy(self) -> PolicyModel[Any]:
        return ContinuousOpenVlaOft.create(tiny(image_size=28, head="l1"), seed=0)


@asynccontextmanager
async def opened_in_this_process(engine: Any, policy: Any) -> AsyncIterator[Any]:
    async with DeviceLane(1) as lane, engine(policy, lane, EngineConfig(max_reply=24)) as opened:
        opened.lane = lane
        yield opened


class TestTorchActionEngine(ActionEngineContract):
    def make_policy(self) -> Any:
        return token_policy()

    def make_observation(self, number: int) -> Observation:
        return observe(number)

    def open_engine(self) -> Any:
        return opened_in_this_process(TorchActionEngine, self.make_policy())

    async def publish(self, engine: Any, policy: Any, version: int) -> None:
        await engine.lane.run(engine.apply_weights, policy.network, version)


class TestTorchChatEngine(ChatEngineContract):
    def make_policy(self) -> CausalLanguageModel:
        return completing_policy()

    def open_engine(self) -> Any:
        return opened_in_this_process(TorchChatEngine, self.make_policy())


FORKED = ChildProcess(fork_from=ForkServer(imports=("sample_actors",)))


class TestCounter(ActorContract):
    actor = Counter
    arguments = (3,)
    in_process = FORKED

    async def use(self, actor: Counter) -> Any:
        return await actor.add(2), await actor.echo_array(np.arange(3)), await actor.seen()


class TestStreamer(ActorContract):
    actor = Streamer
    in_process = FORKED

    async def use(self, actor: Streamer) -> Any:
        return [number async for number in actor.count(5)], await actor.made()


class TestHostMonitor(ActorContract):
    actor = HostMonitor

    async def use(self, actor: HostMonitor) -> Any:
        return (await actor.report()).versions


class TestEnvWorker(ActorContract):
    actor = EnvWorker
    arguments = (1,)

    async def use(self, actor: EnvWorker) -> Any:
        described = await actor.build_env(0, EnvSpec(id="vla_rl/toy_reach-v0"))
        _, info = await actor.reset(0, 5, None, 0)
        return described.observation_space, info


class TestImageCache(ActorContract):
    actor = ImageCache
    arguments = (1 << 20,)

    async def use(self, actor: ImageCache) -> Any:
        return await actor.greet()
