"""The seat of each rank: the host and the device on which it runs."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from vla_rl.actors import ChildProcess, ForkServer, RemoteHost
from vla_rl.learner.rank_memory import gpus_of


@dataclass(frozen=True)
class RankSeat:
    """The place of one rank."""

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
    def in_words(self) -> str:
        """Its host, as a part of messages; empty on this host."""
        return f" on host {self.host!r}" if self.placement is not None else ""

    @property
    def gpu_in_words(self) -> str:
        """Its GPU, as the beginning of a message."""
        return f"GPU {self.gpu}{self.in_words or ' of this host'}"


@dataclass(frozen=True)
class Seating:
    """The seats of all ranks, by number."""

    seats: tuple[RankSeat, ...]

    port: int = 0
    """Port at which rank 0 waits for ranks of other hosts; 0 for any that is free."""

    @property
    def has_several_hosts(self) -> bool:
        """Whether the ranks talk over a network."""
        return len({seat.host for seat in self.seats}) > 1

    @property
    def far_hosts(self) -> dict[str, list[int]]:
        """Numbers of the ranks on each other host."""
        found: dict[str, list[int]] = {}
        for rank, seat in enumerate(self.seats):
            if seat.placement is not None:
                found.setdefault(seat.host, []).append(rank)
        return found


def seated_here(num_ranks: int, lost_gpus: Collection[int], *, on_gpus: bool) -> Seating:
    """Return seats on this host: one GPU for each rank, or its CPU for all."""
    return Seating(
        tuple(
            RankSeat(f"cuda:{gpu}" if on_gpus else "cpu") for gpu in gpus_of(num_ranks, lost_gpus)
        )
    )


def process_of(seat: RankSeat, model: Any) -> ChildProcess | RemoteHost:
    """Return where a rank runs: forked from one server that has imported torch and the policy."""
    # loopback, unless the ranks' meeting names another interface: neither gloo nor NCCL encrypts
    env = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    # AdamW imports torch._dynamo when it is made, a second of each rank's start
    imports = (type(model).__module__, "vla_rl.learner.distributed.rank", "torch._dynamo")
    far = seat.placement
    if far is not None:
        env |= far.env
    child = ChildProcess(env=env, fork_from=ForkServer(imports=imports, env=env))
    if far is None:
        return child
    return RemoteHost(
        address=far.address,
        server_public_key=far.server_public_key,
        client_keys=far.client_keys,
        lost_after_s=far.lost_after_s,
        process=child,
    )
