"""Episodes of the reach task, run with an engine of a test."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_rl.actors import LastingForkServers, Runtime
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.evaluation import run_each
from vla_rl.recipes.watch_libero import RandomActions
from vla_rl.types import (
    ActionChunk,
    Agent,
    EnvSpec,
    EpisodeSpec,
    Observation,
    Sampling,
    Trajectory,
)

TOY = EnvSpec(id="vla_rl/toy_reach-v0", kwargs={"action_dim": 7, "step_limit": 6})


def toy_episodes(num: int, env: EnvSpec = TOY) -> list[EpisodeSpec]:
    return [
        EpisodeSpec(
            episode_id=k,
            group_id=k,
            member=0,
            env=env,
            task="toy/0",
            seed=0,
            policy_seed=k,
            options={"init_state_id": k},
        )
        for k in range(num)
    ]


async def played(
    agent: Agent,
    episodes: Sequence[EpisodeSpec],
    num_envs: int = 2,
    engine: Any = None,
    servers: LastingForkServers | None = None,
    **changed: Any,
) -> list[Trajectory]:
    trajectories: list[Trajectory] = []

    async def done(trajectory: Trajectory) -> None:
        trajectories.append(trajectory)

    async with (
        Runtime("test", fork_servers=servers) as runtime,
        SimulatorPool(runtime, SimulatorConfig(num_envs=num_envs)) as pool,
    ):
        await run_each(pool, engine or RandomActions(), agent, episodes, done, **changed)
    return sorted(trajectories, key=lambda trajectory: trajectory.episode.episode_id)


class Fixed:
    """An engine that always gives the same answer."""

    weight_version = 4

    def __init__(self, action: list[float], log_prob: float = -1.0, rows: int = 1) -> None:
        self._chunk = ActionChunk(
            actions=np.array([action] * rows, np.float32),
            tokens=np.array(action, np.float32),
            log_probs=np.full(len(action), log_prob, np.float32),
            weight_version=4,
        )

    async def act(self, observation: Observation, sampling: Sampling) -> ActionChunk:
        return self._chunk


STILL = [0.0] * 7
