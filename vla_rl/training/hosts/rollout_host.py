"""The actor that runs episodes on a host, with simulators and an engine of its own there.

files of the policy ─► load ─► engine ─┐
recipe ─► simulators ──────────────────┴─► play(episode) ─► light trajectory
                                                       └► depot ─► take(key) ─► its arrays
begin, put, check ─► apply: the next version of the weights, between two batches
"""

import asyncio
import os
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch

from vla_rl.actors import Actor, Runtime, actor_method
from vla_rl.actors.owned_folder import OwnedFolder, sweep
from vla_rl.engines import DeviceLane
from vla_rl.errors import ConfigError
from vla_rl.evaluation.playing import within_range
from vla_rl.pipelines.config import LearningConfig
from vla_rl.rollout import EpisodeLost, LocalPlayer, TaskStart, embodied_agent
from vla_rl.rollout.depot import Depot
from vla_rl.training.agents import agent_of
from vla_rl.training.devices import device_of
from vla_rl.training.hosts.environments import with_environments
from vla_rl.training.hosts.flat_weights import IncomingWeights
from vla_rl.training.hosts.messages import HostRecipe, HostStatus, Loss, Played, WeightHeading
from vla_rl.training.pools import pool_of
from vla_rl.training.team import OwnedEngine, Team, engines_of
from vla_rl.types import SOLE_MEMBER, Agent, EpisodeSpec

POLICY_PREFIX: Final = "vla_rl-policy-"
"""Beginning of the names of folders for a policy's files."""


class RolloutHost(Actor):
    """Runs the episodes that it is given, several at the same time.

    The policy's files come first (`put_file`), then `open`. Weights change by `begin_weights`,
    `put_weights` and `check_weights`, beside running episodes, and `apply_weights` between two
    batches, so that each decision is made with exactly the version that it names.

    Args:
        host: name of this host.
        depot_bytes: most bytes of arrays that are kept here.
    """

    def __init__(self, host: str, depot_bytes: int) -> None:
        self._depot = Depot(host, depot_bytes)
        self._serving: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._incoming: IncomingWeights | None = None
        self._weights_digest, self._recipe_digest = "", ""
        self._is_new = True

    async def on_start(self) -> None:
        """Make a folder for the policy's files; remove those of processes that were killed."""
        await asyncio.to_thread(sweep, POLICY_PREFIX)
        self._folder = await asyncio.to_thread(OwnedFolder, POLICY_PREFIX)

    async def put_file(self, name: str, start: int, piece: np.ndarray) -> None:
        """Append a piece to a file of the policy. Raises: ValueError for a place outside of it."""
        self._is_new = False
        await asyncio.to_thread(_append, self._folder.path, name, start, piece)

    async def open(self, recipe: HostRecipe) -> HostStatus:
        """Load the policy, and start the engine and all simulators.

        Raises: what the policy, an environment or the configuration raises.
        """
        self._is_new = False
        # one task enters and leaves what it opens: a group of tasks belongs to the task that entered
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve(recipe, ready), name="serve episodes")
        await asyncio.wait((ready, self._serving), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            self._serving.result()
        self._recipe_digest = recipe.digest
        return self._status()

    async def found(self) -> str | None:
        """Return the digest of the recipe by which this process runs episodes already.

        None: it is new. Empty: an earlier client left it in a state in which it cannot.
        """
        if self._is_new:
            return None
        is_serving = self._serving is not None and not self._serving.done()
        return self._recipe_digest if is_serving else ""

    async def resume(self, keys: list[int]) -> HostStatus:
        """Go on for another client, which needs the arrays of these episodes and no others."""
        return self._status(self._depot.keep(keys))

    @actor_method(concurrent=True)
    async def stay(self) -> None:
        """Return never while episodes can run. Raises: what ended the simulators or the engine."""
        assert self._serving is not None, "open comes first"
        await asyncio.shield(self._serving)

    @actor_method(concurrent=True)
    async def play(
        self, episode: EpisodeSpec, timeout_s: float | None, dropped: list[int], evaluates: bool
    ) -> Played:
        """Run an episode once; its large arrays stay here.

        Args:
            episode: the episode.
            timeout_s: as for `play_episode`.
            dropped: keys of arrays that nothing will use.
            evaluates: run it as an evaluation does, and not by the run's agent.

        Raises: as `play_episode`, but a loss is returned.
        """
        for key in dropped:
            self._depot.drop(key)
        clock = asyncio.get_running_loop().time
        try:
            player = self._evaluator if evaluates else self._player
            trajectory = await player.play(episode, timeout_s=timeout_s)
        except EpisodeLost as loss:
            lost = Loss(kind=loss.kind, what=str(loss.__cause__ or loss))
            return Played(trajectory=None, loss=lost, counts=self._player.decisions(clock()))
        light = self._depot.put(trajectory)
        return Played(trajectory=light, counts=self._player.decisions(clock()))

    @actor_method(concurrent=True)
    async def take(self, key: int) -> dict[str, np.ndarray] | None:
        """Hand over the arrays of an episode; None if they are not here."""
        return self._depot.take(key)

    async def begin_weights(self, heading: WeightHeading) -> None:
        """Make room for a version of the weights. Raises: CheckpointError if it does not fit."""
        self._incoming = IncomingWeights(heading, self._model.network)

    async def put_weights(self, start: int, piece: np.ndarray) -> None:
        """Add the next piece. Raises: CheckpointError if it is not the next one."""
        assert self._incoming is not None, "begin_weights comes first"
        self._incoming.put(start, piece)

    async def check_weights(self) -> None:
        """Compare what came with its digest. Raises: CheckpointError if they differ."""
        assert self._incoming is not None, "begin_weights comes first"
        await asyncio.to_thread(self._incoming.check)

    async def apply_weights(self) -> int:
        """Let the engine act with the checked weights; return their version."""
        assert self._incoming is not None, "begin_weights comes first"
        incoming, self._incoming = self._incoming, None
        await self._lane.run(self._adopt, incoming, work="publish")
        return incoming.heading.version

    async def on_stop(self) -> None:
        """Close simulators and engine, and remove the policy's files if they were not read."""
        self._stop.set()
        if self._serving is None:
            await asyncio.to_thread(self._folder.remove)
        else:
            await asyncio.wait((self._serving,))

    def _status(self, kept: tuple[int, ...] = ()) -> HostStatus:
        return HostStatus(
            num_slots=self._player.num_slots,
            weight_version=self._player.weight_version,
            weights_digest=self._weights_digest,
            kept=kept,
        )

    def _adopt(self, incoming: IncomingWeights) -> None:
        incoming.apply()
        self._weights_digest = incoming.heading.digest
        self._engine.adopt(self._model.network, incoming.heading.version)

    async def _serve(self, recipe: HostRecipe, ready: asyncio.Future[None]) -> None:
        config = msgspec.json.decode(recipe.config, type=_imported(recipe.config_class))
        assert isinstance(config, LearningConfig)
        if recipe.num_envs is not None:
            config = with_environments(config, recipe.num_envs)
        device = device_of(config.run)
        try:
            self._model = await asyncio.to_thread(_loaded, recipe, self._folder.path, device)
        finally:
            # at once: a host that is killed leaves no copy of the policy on its disk
            await asyncio.to_thread(self._folder.remove)
        starts = [TaskStart(env=env, task=env.id) for env in recipe.envs]
        async with Runtime("rollout") as runtime, DeviceLane(config.run.torch_threads) as lane:
            self._lane = lane
            engines = engines_of(config, Team.of(self._model), lane, recipe.weight_version)
            self._engine: OwnedEngine = engines.owned[SOLE_MEMBER]
            async with pool_of(config, runtime, starts) as pool, engines:
                self._player = LocalPlayer(pool, engines, _agent(recipe, config))
                self._evaluator = LocalPlayer(pool, engines, within_range(embodied_agent))
                ready.set_result(None)
                await self._stop.wait()


def _append(folder: Path, name: str, start: int, piece: np.ndarray) -> None:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"the file {name!r} is outside of the policy's folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        size = os.fstat(file.fileno()).st_size
        if size != start:
            raise ValueError(f"{name} has {size} bytes, and the piece begins at {start}")
        file.write(piece.data)


def _loaded(recipe: HostRecipe, folder: Path, device: torch.device) -> Any:
    model = _imported(recipe.policy_class).load(folder)
    model.network.to(device, getattr(torch, recipe.dtype))
    return model


def _agent(recipe: HostRecipe, config: LearningConfig) -> Agent:
    return agent_of(config) if recipe.agent is None else _imported(recipe.agent)


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"this host cannot import {path}: {error}; expected the same modules as on the control "
            "process's host, in a package that is installed, or on PYTHONPATH of `vla-rl host`"
        ) from error
