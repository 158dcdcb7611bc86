"""Episodes that are run in this process, apart from any training run, and records of evaluated ones."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vla_rl.actors import LastingForkServers, Runtime
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.evaluation.checkpoint_evaluator import load_policy
from vla_rl.evaluation.records import EpisodeRecord, make_record
from vla_rl.evaluation.run_episodes import run_each, within_range
from vla_rl.recipes.watch_libero import RandomActions
from vla_rl.rollout import embodied_agent
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


async def run_toys(
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


class FixedAnswer:
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


async def evaluate_offline(
    policy: Path,
    episodes: Sequence[EpisodeSpec],
    version: int,
    fork_servers: LastingForkServers | None = None,
) -> list[EpisodeRecord]:
    """The records of an MLP policy's folder, with one simulator, and so decisions one at a time."""
    records = list[EpisodeRecord]()

    async def done(trajectory: Trajectory) -> None:
        records.append(make_record(trajectory, weights=version))

    model = load_policy("vla_rl.models.mlp:MlpPolicy", policy, "cpu")
    async with (
        Runtime("offline", fork_servers=fork_servers) as runtime,
        DeviceLane(1) as lane,
        SimulatorPool(runtime, SimulatorConfig(num_envs=1)) as pool,
        TorchActionEngine(model, lane, EngineConfig(), version) as engine,
    ):
        await run_each(pool, engine, within_range(embodied_agent), episodes, done)
    return records


def evaluated(
    task: str = "libero_goal/7", start: int = 0, is_success: bool = True, **changed: Any
) -> EpisodeRecord:
    """A success or a failure from a start."""
    fields = {
        "seed": 0,
        "weights": 0,
        "member": 0,
        "value": float(is_success),
        "parts": {"steps": 100.0, "attempts": 1.0},
        "instruction": "turn on the stove",
    }
    return EpisodeRecord(task=task, start=start, **{**fields, **changed})


def scored(weights: int, start: int, value: float, **parts: float) -> EpisodeRecord:
    """A score of a drive."""
    return EpisodeRecord(
        task="driving", start=start, seed=0, weights=weights, member=0, value=value, parts=parts
    )


def as_lines(records: Iterable[EpisodeRecord]) -> bytes:
    """What the file of these records holds."""
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


def write_records(path: Path, records: Iterable[EpisodeRecord]) -> None:
    path.write_bytes(as_lines(records))
