"""Hosts of the ranks: where each rank runs, how it is started there, which files it needs there.

Ranks on other hosts need the policy at their start, and later what they read of a checkpoint. Each host
gets a file once, through its first rank, whatever the number of its ranks; of a checkpoint it gets the
bytes that its ranks read, at their offsets in a file with holes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from vla_rl.actors import ChildProcess, ForkServer, RemoteHost, Runtime
from vla_rl.errors import ConfigError
from vla_rl.learner.config import LearnerConfig
from vla_rl.learner.distributed.host_rank import (
    code_report,
    merge_ranges,
    read_bytes,
    require_same_code,
    split_ranges,
)
from vla_rl.learner.distributed.rank import LearnerRank
from vla_rl.learner.distributed.rank_parts import PolicySource
from vla_rl.learner.distributed.rendezvous import RENDEZVOUS_TIMEOUT_S, Network, Rendezvous
from vla_rl.learner.distributed.state import read_header
from vla_rl.learner.estimates.rank_memory import choose_gpus
from vla_rl.learner.ranks import in_order


@dataclass(frozen=True)
class RankAssignment:
    """Host and device of one rank."""

    device: str
    """Device on its host, such as `cpu` or `cuda:3`."""

    host: str = ""
    """Name of its host; empty for this one."""

    placement: RemoteHost | None = None
    """How processes are started there; None for this host."""

    address: str = ""
    """IP address or name at which the other ranks' hosts reach its host."""

    interface: str = ""
    """Network interface for the ranks there; empty for the one that has `address`."""

    gpu: int | None = None
    """Number of its GPU among those of its host that a run may use; None for a CPU, and for ranks
    that are all on this host."""

    gpu_bytes: int | None = None
    """Memory of that GPU."""

    @property
    def location(self) -> str:
        """Its host, as a part of messages; empty on this host."""
        return f" on host {self.host!r}" if self.placement is not None else ""

    @property
    def gpu_name(self) -> str:
        """Its GPU, as the beginning of a message."""
        return f"GPU {self.gpu}{self.location or ' of this host'}"


@dataclass(frozen=True)
class RankAssignments:
    """Host and device of all ranks."""

    by_rank: tuple[RankAssignment, ...]
    """Assignments by the number of the rank."""

    port: int = 0
    """Port at which rank 0 waits for ranks of other hosts; 0 for any that is free."""

    @property
    def are_on_several_hosts(self) -> bool:
        """Whether the ranks talk over a network."""
        return len({each.host for each in self.by_rank}) > 1

    @property
    def other_hosts(self) -> dict[str, list[int]]:
        """Numbers of the ranks on each other host."""
        found: dict[str, list[int]] = {}
        for rank, assignment in enumerate(self.by_rank):
            if assignment.placement is not None:
                found.setdefault(assignment.host, []).append(rank)
        return found


def assign_local_ranks(
    num_ranks: int, lost_gpus: Collection[int], *, on_gpus: bool
) -> RankAssignments:
    """Assign ranks to this host: one GPU for each, or its CPU for all.

    Example:
        One rank here and one on another host:

        RankAssignments((RankAssignment("cuda:0", gpu=0),
                         RankAssignment("cuda:0", host="gpu2", placement=..., address="10.0.0.2", gpu=0)))
    """
    return RankAssignments(
        tuple(
            RankAssignment(f"cuda:{gpu}" if on_gpus else "cpu")
            for gpu in choose_gpus(num_ranks, lost_gpus)
        )
    )


def make_placement(assignment: RankAssignment, model: Any) -> ChildProcess | RemoteHost:
    """Return where a rank runs: forked from one server that has imported torch and the policy."""
    # loopback, unless the ranks' rendezvous names another interface: neither gloo nor NCCL encrypts
    env = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    # AdamW imports torch._dynamo when it is made, a second of each rank's start
    imports = (type(model).__module__, "vla_rl.learner.distributed.rank", "torch._dynamo")
    host = assignment.placement
    if host is not None:
        env |= host.env
    child = ChildProcess(env=env, fork_from=ForkServer(imports=imports, env=env))
    if host is None:
        return child
    return RemoteHost(
        address=host.address,
        server_public_key=host.server_public_key,
        client_keys=host.client_keys,
        lost_after_s=host.lost_after_s,
        process=child,
    )


START_TIMEOUT_S: Final = 600.0
"""Longest start of a rank, in which it imports torch and the policy's code."""


class RankStarter:
    """Starts ranks where they sit. Each method is for one rank; all are called for every rank.

    Args:
        runtime: starts the processes.
        config: settings of the ranks.
        assignments: where they are.
        folder: a folder here that lasts as long as the ranks.
    """

    def __init__(
        self, runtime: Runtime, config: LearnerConfig, assignments: RankAssignments, folder: Path
    ) -> None:
        self._runtime, self._config, self._assignments = runtime, config, assignments
        self._local_rendezvous = Rendezvous(file=str(folder / "rendezvous"))
        self._networks = _rank_networks(assignments)

    async def spawn_rank(
        self, rank: int, name: str, source: PolicySource, model: Any
    ) -> LearnerRank:
        """Start the process of a rank. Raises: ConfigError if its host lacks the policy's module."""
        assignment = self._assignments.by_rank[rank]
        try:
            return await self._runtime.spawn(
                LearnerRank,
                rank,
                source,
                self._config,
                name=name,
                placement=make_placement(assignment, model),
                start_timeout_s=START_TIMEOUT_S,
            )
        except ImportError as error:
            raise ConfigError(
                f"rank {rank}{assignment.location} cannot import {source.policy_class}: {error}; expected "
                "the same modules as here, in a package that is installed, or on PYTHONPATH of "
                "`vla-rl host`"
            ) from error

    async def open_rendezvous(self, rank: int, first: LearnerRank) -> Rendezvous:
        """Return where the ranks meet; rank 0 waits there for those of other hosts.

        Raises: ConfigError if it cannot.
        """
        network = self._networks[rank]
        if rank > 0 or network is None:
            return self._local_rendezvous
        try:
            return await first.open_rendezvous(network, self._assignments.port, len(self._networks))
        except ConfigError as error:
            raise self._located(rank, error) from error

    async def connect_rank(self, rank: int, actor: LearnerRank, rendezvous: Rendezvous) -> None:
        """Connect a rank to all others. Raises: ConfigError, TimeoutError if it cannot."""
        try:
            # twice: those that wait for a host that is missing report it first
            async with asyncio.timeout(2 * RENDEZVOUS_TIMEOUT_S):
                await actor.join_group(rendezvous, self._networks[rank])
        except ConfigError as error:
            raise self._located(rank, error) from error
        except TimeoutError:
            raise TimeoutError(
                f"the ranks did not connect to each other within {2 * RENDEZVOUS_TIMEOUT_S:g} s; let the "
                "hosts that learn reach all of each other's ports, or name another `interface` in "
                "the list of hosts"
            ) from None

    def _located(self, rank: int, error: ConfigError) -> ConfigError:
        return ConfigError(f"rank {rank}{self._assignments.by_rank[rank].location}: {error}")


def save_policy(model: Any, folder: Path, assignments: RankAssignments) -> PolicySource:
    """Save a policy for the ranks; the folder lasts as long as they do.

    Raises: ConfigError for compiled blocks.
    """
    if getattr(model, "compiles_blocks", False):
        raise ConfigError(
            "the policy's blocks are compiled, which learner ranks do not do yet, expected either "
            "of both: leave --compile-blocks out, or set --learner.ranks 1"
        )
    model.save(folder)
    kind, network = type(model), model.network
    parameters = dict(network.named_parameters())
    return PolicySource(
        policy_class=f"{kind.__module__}:{kind.__qualname__}",
        dtype=str(next(iter(parameters.values())).dtype).removeprefix("torch."),
        trained=frozenset(name for name, each in parameters.items() if each.requires_grad),
        recomputes=getattr(model, "recomputes_activations", False),
        devices=tuple(assignment.device for assignment in assignments.by_rank),
    )


def _rank_networks(assignments: RankAssignments) -> Sequence[Network | None]:
    """Return what each rank uses of its host's network; None if all are on this host."""
    if assignments.are_on_several_hosts:
        return [
            Network(assignment.address, assignment.interface) for assignment in assignments.by_rank
        ]
    # all on another one: its loopback
    return [Network("127.0.0.1") if assignments.other_hosts else None] * len(assignments.by_rank)


T = TypeVar("T")

NeededBytes: TypeAlias = Callable[[LearnerRank, list[str]], Awaitable[list[list[tuple[int, int]]]]]
"""Asks a rank for the bytes that it reads of some files, given their paths there."""

NUM_ROUND_TRIPS: Final = 5
"""Questions for another host's clock, of which the quickest answer counts."""


async def measure_clock_offset(rank: LearnerRank) -> float:
    """Return what to add to times of a rank's host to have them on this host's clock."""
    found = []
    # the quickest answer has waited least on its way, so that half of its time is the best guess of
    # one direction
    for _ in range(NUM_ROUND_TRIPS):
        started = time.monotonic()
        remote = await rank.now()
        ended = time.monotonic()
        found.append((ended - started, (started + ended) / 2 - remote))
    return min(found)[1]


class OtherHosts:
    """The other hosts of a learner's ranks.

    Args:
        ranks: handles of all ranks, by number.
        assignments: where they are.
    """

    def __init__(self, ranks: Sequence[LearnerRank], assignments: RankAssignments) -> None:
        self._ranks, self._hosts = ranks, assignments.other_hosts
        self._first = {numbers[0]: host for host, numbers in self._hosts.items()}

    def is_on_other_host(self, rank: int) -> bool:
        """Return whether a rank is on another host."""
        return any(rank in numbers for numbers in self._hosts.values())

    async def require_same_code(self, rank: int, policy_class: str) -> None:
        """Raise ConfigError if this is the first rank of a host that has other code."""
        host = self._first.get(rank)
        if host is not None:
            # once for each host: all of its ranks import the same files
            remote = await self._ranks[rank].code(policy_class)
            require_same_code(host, remote, await asyncio.to_thread(code_report, policy_class))

    async def bring_folder(self, rank: int, folder: Path) -> str | None:
        """Send a folder, if this is the first rank of a host; return where it is there."""
        if rank not in self._first:
            return None
        path = ""
        for file in await asyncio.to_thread(_files_below, folder):
            name = str(Path(folder.name) / file.relative_to(folder))
            found = await self._send(rank, file, name, [(0, file.stat().st_size)])
            path = found.removesuffix(name) + folder.name
        return path

    async def bring_needed(
        self, rank: int, files: Sequence[Path], needed: NeededBytes
    ) -> list[str]:
        """Send what the ranks of a host read of some files, if this is its first rank.

        Returns: the paths of the files there, for the ranks of this host; none for another rank.
        """
        host = self._first.get(rank)
        if host is None:
            return []
        paths = []
        for number, file in enumerate(files):
            header, _ = await asyncio.to_thread(read_header, file)
            paths.append(await self._send(rank, file, f"checkpoint-{number}", [(0, len(header))]))
        # the ranks say what they read, because only FSDP knows which rows are whose
        asked = [await needed(self._ranks[each], paths) for each in self._hosts[host]]
        for number, file in enumerate(files):
            ranges = merge_ranges([each for of_rank in asked for each in of_rank[number]])
            await self._send(rank, file, f"checkpoint-{number}", ranges)
        return paths

    def by_rank(self, found: Sequence[T]) -> list[T | None]:
        """Return for each rank what the first rank of its host has; None for ranks on this host."""
        by_rank: list[T | None] = [None] * len(self._ranks)
        for numbers in self._hosts.values():
            for number in numbers:
                by_rank[number] = found[numbers[0]]
        return by_rank

    async def remove_files(self, rank: int) -> None:
        """Remove what was sent, if this is the first rank of a host."""
        if rank in self._first:
            await self._ranks[rank].remove_files()

    async def _send(
        self, rank: int, file: Path, name: str, ranges: Sequence[tuple[int, int]]
    ) -> str:
        size = (await asyncio.to_thread(file.stat)).st_size

        async def send(piece: tuple[int, int]) -> str:
            data = await asyncio.to_thread(read_bytes, file, *piece)
            return await self._ranks[rank].write_piece(name, size, piece[0], data)

        # an empty file has one piece too
        pieces = split_ranges(ranges) or [(0, 0)]
        found = await in_order(send, pieces)
        return found[-1]


def _files_below(folder: Path) -> list[Path]:
    return sorted(each for each in folder.rglob("*") if each.is_file())
