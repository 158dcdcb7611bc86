"""Actors of the package keep the rules of `vla_rl.testing`, as actors of one's own have to."""

from typing import Any

import numpy as np
from sample_actors import Counter, Streamer

from vla_rl.actors import ChildProcess, ForkServer
from vla_rl.cluster.hosts import HostMonitor
from vla_rl.env_workers.worker import EnvWorker
from vla_rl.remote_rollout.image_cache import ImageCache
from vla_rl.testing import ActorContract
from vla_rl.types import EnvSpec

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
