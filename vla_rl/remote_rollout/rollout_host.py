"""The actor that runs episodes on a host, with simulators and the policies' engines of its own there.

files of the policies ─► load ─► engines ─┐
recipe ─► simulators ─────────────────────┴─► run episodes(episode) ─► metadata-only trajectory
                                                          └► episode store ─► take(key) ─► its arrays
                                                                 └──► an image cache: its observations
begin, put or take, check ─► apply: the next version of a policy's weights, between two batches
"""

import asyncio
import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch

from vla_rl.actors import Actor, Runtime, actor_method
from vla_rl.actors.remote.peer_sockets import SocketAddress
from vla_rl.algorithms import TrajectoryEncoder
from vla_rl.cluster.run_layout import VISIBLE
from vla_rl.engines import DeviceLane
from vla_rl.engines.vllm.staging import HostMemory
from vla_rl.engines.weight_shards import WeightShard
from vla_rl.errors import ConfigError
from vla_rl.evaluation.run_episodes import embodied_agent_within_range
from vla_rl.pipelines.config import LearningConfig
from vla_rl.remote_rollout.episode_store import EMBEDDING, EpisodeStore, without_observed
from vla_rl.remote_rollout.flat_weights import (
    HeldVersion,
    IncomingWeights,
    OpenedWeights,
    WeightHeading,
)
from vla_rl.remote_rollout.host_recipe import (
    HostEpisode,
    HostRecipe,
    HostStatus,
    LostEpisode,
    MemberRecipe,
    import_named,
    load_encoder,
    make_agent,
    with_environments,
)
from vla_rl.remote_rollout.image_links import ImageReply, ImageRequest, ImageSource, join_arrays
from vla_rl.remote_rollout.weight_links import ReceivedBytes, WeightRows
from vla_rl.remote_rollout.weight_store import WeightStore
from vla_rl.rollout import EpisodeLost, LocalEpisodeRunner, TaskStart
from vla_rl.team.devices import resolve_device
from vla_rl.team.members import Member, OwnedEngine, RunModel, Team, make_engines
from vla_rl.team.pools import make_pool
from vla_rl.types import EpisodeSpec
from vla_rl.util.arrays import torch_dtype
from vla_rl.util.ownership import OwnedFolder, remove_abandoned_folders

POLICY_PREFIX: Final = "vla_rl-policy-"
"""Beginning of the names of folders for a policy's files."""


class RolloutHost(Actor):
    """Runs the episodes that it is given, several at the same time.

    The policies' files come first (`put_file`), then `open`. Weights of a policy change by
    `begin_weights`, then `put_weights` or `receive_weights` with `check_weights`, or `receive_shards`, beside
    running episodes, and by `apply_weights` between two batches, so that each decision is made with exactly the version
    that it names.

    Args:
        host: name of this host.
        depot_bytes: most bytes of arrays that are kept here.
    """

    def __init__(self, host: str, store_bytes: int) -> None:
        self._name, self._store = host, EpisodeStore(host, store_bytes)
        self._serving: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._digests: dict[str, str] = {}
        self._encoder: TrajectoryEncoder | None = None
        self._recipe_digest = ""
        self._is_new = True

    async def on_start(self) -> None:
        """Make a folder for the policies' files; remove those of processes that were killed."""
        await asyncio.to_thread(remove_abandoned_folders, POLICY_PREFIX)
        self._folder = await asyncio.to_thread(OwnedFolder, POLICY_PREFIX)

    async def put_file(self, name: str, start: int, piece: np.ndarray) -> None:
        """Append a piece to a file of the policies.

        Raises: ValueError for a place outside of it; ConfigError if the disk is full.
        """
        self._is_new = False
        try:
            await asyncio.to_thread(_append, self._folder.path, name, start, piece)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise ConfigError(
                f"host {self._name!r} has no room for the policies' files: its disk is full after "
                f"{start} bytes of {name}, at {self._folder.path}; expected room for all of them, so "
                "free some, or start `vla-rl host` there with TMPDIR on a larger disk"
            ) from error

    async def open(self, recipe: HostRecipe) -> HostStatus:
        """Load the policies, and start their engines and all simulators.

        Raises: what a policy, an environment or the configuration raises.
        """
        self._is_new = False
        # one task enters and leaves what it opens: a group of tasks belongs to the task that entered
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve(recipe, ready), name="serve episodes")
        await asyncio.wait((ready, self._serving), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            self._serving.result()
        self._recipe_digest = recipe.recipe_digest
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
        return self._status(self._store.keep_only(keys))

    @actor_method(concurrent=True)
    async def stay(self) -> None:
        """Return never while episodes can run. Raises: what ended the simulators or an engine."""
        assert self._serving is not None, "open comes first"
        await asyncio.shield(self._serving)

    @actor_method(concurrent=True)
    async def run_episode_once(
        self, episode: EpisodeSpec, timeout_s: float | None, dropped: list[int], evaluates: bool
    ) -> HostEpisode:
        """Run an episode once; its large arrays stay here.

        Args:
            episode: the episode.
            timeout_s: as for `run_episode`.
            dropped: keys of arrays that nothing will use.
            evaluates: run it as an evaluation does, and not by the run's agent.

        Raises: as `run_episode`, but a loss is returned.
        """
        for key in dropped:
            self._store.drop_episode(key)
        clock = asyncio.get_running_loop().time
        try:
            runner = self._evaluator if evaluates else self._runner
            trajectory = await runner.run_episode(episode, timeout_s=timeout_s)
        except EpisodeLost as loss:
            lost = LostEpisode(kind=loss.kind, what=str(loss.__cause__ or loss))
            return HostEpisode(trajectory=None, loss=lost, counts=self._runner.decisions(clock()))
        metadata = self._store.put_arrays(trajectory)
        return HostEpisode(trajectory=metadata, counts=self._runner.decisions(clock()))

    @actor_method(concurrent=True)
    async def take_arrays(self, key: int, is_cached: bool) -> dict[str, np.ndarray] | None:
        """Hand over the arrays of an episode, with its embedding if the run has an encoder.

        Args:
            key: of the episode.
            is_shelved: whether the image cache has its observations, which are left out then.

        Returns: arrays by place; None if they are not here. Raises: ValueError if it cannot be
        embedded.
        """
        if self._encoder is None:
            arrays = self._store.take_arrays(key)
        else:
            arrays = await _take_embedded(self._store, key, self._encoder)
        return without_observed(arrays) if is_cached and arrays is not None else arrays

    async def share_images(self) -> ImageSource:
        """Return a handle of the observations that are kept here, for one image cache.

        Raises: OSError if no port is free.
        """
        return await self._runtime.share(self._image_source)

    async def begin_weights(self, heading: WeightHeading) -> None:
        """Make room for a version of the weights. Raises: CheckpointError if it does not fit."""
        self._weight_store.begin(heading)

    async def put_weights(self, member: str, start: int, piece: np.ndarray) -> None:
        """Add the next piece. Raises: CheckpointError if it is not the next one."""
        await self._weight_store.put(member, start, piece)

    async def open_sockets(self, member: str, keys: list[str]) -> list[SocketAddress]:
        """Let ranks with these keys give their shards. Raises: OSError if no port is free."""
        return self._weight_store.open_sockets(member, keys)

    @actor_method(concurrent=True)
    async def receive_shards(self, member: str, shards: list[WeightShard]) -> str:
        """Take the shards of the learner's ranks, and check them; return the digest of the row.

        Args:
            member: the policy.
            shards: what the ranks have, in the order of their keys.

        Raises: CheckpointError for other bytes; WeightsNotGiven if a rank is silent.
        """
        return await self._weight_store.receive_shards(member, shards)

    async def share_rows(self) -> WeightRows:
        """Return a handle of the weights here, for one peer. Raises: OSError if no port is free."""
        return await self._runtime.share(self._weight_rows)

    @actor_method(concurrent=True)
    async def receive_weights(self, member: str, rows: WeightRows) -> ReceivedBytes:
        """Take what is missing of a policy's weights from a peer, whose `share_rows` returned `rows`.

        Raises: CheckpointError for bytes that do not fit.
        """
        return await self._weight_store.receive(member, rows)

    async def num_received(self, member: str) -> int:
        """Return the number of bytes that have come of the version that was begun last."""
        return self._weight_store.num_received(member)

    async def check_weights(self, member: str, digest: str) -> None:
        """Compare what came with its digest. Raises: CheckpointError if they differ."""
        await self._weight_store.check(member, digest)

    async def share_weights(self, member: str) -> HostMemory:
        """Return where other processes of this machine find the bytes that were checked."""
        return self._weight_store.memory(member)

    async def open_weights(self, heading: WeightHeading, memory: HostMemory, digest: str) -> None:
        """Open a version that another process of this machine has checked.

        Raises: CheckpointError if it does not fit, or is not on this machine.
        """
        await asyncio.to_thread(self._weight_store.open, heading, memory, digest)

    async def apply_weights(self, member: str) -> None:
        """Let the engine of a policy act with its checked weights."""
        await self._lane.run(self._apply, self._weight_store.to_apply(member), work="publish")

    async def renew_weights(self, member: str, version: int) -> None:
        """Let the engine of a policy act with the weights that it has, as a new version."""
        network = self._models[member].network
        await self._lane.run(self._engines[member].apply_weights, network, version, work="publish")

    async def on_stop(self) -> None:
        """Close simulators and engines, and remove the policies' files if they were not read."""
        self._stop.set()
        if self._serving is None:
            await asyncio.to_thread(self._folder.remove_folder)
        else:
            await asyncio.wait((self._serving,))

    def _find_images(self, wanted: ImageRequest) -> ImageReply | None:
        arrays = self._store.get_observed(wanted.key)
        return None if arrays is None else join_arrays(arrays)

    def _status(self, kept: tuple[int, ...] = ()) -> HostStatus:
        held = {
            name: HeldVersion(version=engine.weight_version, digest=self._digests.get(name, ""))
            for name, engine in self._engines.items()
        }
        return HostStatus(num_slots=self._runner.num_slots, held=held, kept=kept)

    def _apply(self, newest: IncomingWeights | OpenedWeights) -> None:
        newest.write_to_network()
        heading = newest.heading
        self._digests[heading.member] = newest.digest
        network = self._models[heading.member].network
        self._engines[heading.member].apply_weights(network, heading.version)

    async def _serve(self, recipe: HostRecipe, ready: asyncio.Future[None]) -> None:
        config = msgspec.json.decode(recipe.config, type=import_named(recipe.config_class))
        assert isinstance(config, LearningConfig)
        if recipe.share is not None:
            config = with_environments(config, recipe.share)
        device, folder = resolve_device(config.run), self._folder
        self._lane = DeviceLane(config.run.torch_threads)
        try:
            team = await asyncio.to_thread(_load_team, recipe, config, folder.path, device)
            if recipe.embedding is not None:
                (member,) = team.members.values()
                # before engines start: those of vLLM refuse a GPU that has too little left for them
                self._encoder = await asyncio.to_thread(
                    load_encoder, recipe.embedding, member.model, self._lane, folder.path, device
                )
        finally:
            # at once: a host that is killed leaves no copy of a policy on its disk
            await asyncio.to_thread(folder.remove_folder)
        self._models: dict[str, RunModel] = {
            name: member.model for name, member in team.members.items()
        }
        self._weight_store = WeightStore(
            {name: model.network for name, model in self._models.items()}
        )
        starts = [TaskStart(env=env, task=env.id) for env in recipe.envs]
        async with Runtime("rollout") as runtime, self._lane as lane:
            self._runtime = runtime
            self._weight_rows = await runtime.spawn(WeightRows, self._weight_store)
            self._image_source = await runtime.spawn(ImageSource, self._find_images)
            gpus = _visible_gpus() if device.type == "cuda" else ()
            engines = make_engines(config, team, lane, recipe.weight_version, gpus)
            self._engines: Mapping[str, OwnedEngine] = engines.owned
            async with make_pool(config, runtime, starts) as pool, engines:
                self._runner = LocalEpisodeRunner(pool, engines, make_agent(recipe.agent))
                self._evaluator = LocalEpisodeRunner(pool, engines, embodied_agent_within_range)
                ready.set_result(None)
                try:
                    await self._stop.wait()
                finally:
                    self._weight_store.close()


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


def _load_team(
    recipe: HostRecipe, config: LearningConfig, folder: Path, device: torch.device
) -> Team:
    members: dict[str, Member] = {}
    for name, member in recipe.members.items():
        # an engine in processes of its own reads the weights from the memory of the host
        acts_in_process = (member.engine or config.engine).kind == "torch"
        model = _load_policy(
            member, folder / name, device if acts_in_process else torch.device("cpu")
        )
        members[name] = Member(model, engine=member.engine)
    return Team(members)


def _load_policy(member: MemberRecipe, folder: Path, device: torch.device) -> RunModel:
    model: RunModel = import_named(member.policy_class).load(folder)
    model.network.to(device, torch_dtype(member.dtype))
    return model


def _visible_gpus() -> tuple[str, ...]:
    """Return the ids of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    chosen = os.environ.get(VISIBLE)
    if chosen is None:
        return tuple(str(number) for number in range(torch.cuda.device_count()))
    return tuple(filter(None, chosen.split(",")))


async def _take_embedded(
    store: EpisodeStore, key: int, encoder: TrajectoryEncoder
) -> dict[str, np.ndarray] | None:
    """Take the arrays of an episode out of an episode store, with its embedding; None if they are not there.

    Raises: ValueError naming the episode that cannot be embedded.
    """
    trajectory = store.get_trajectory(key)
    if trajectory is None:
        return None
    (embedding,) = await encoder.embed([trajectory])
    arrays = store.take_arrays(key)
    return None if arrays is None else {**arrays, EMBEDDING: embedding}
