"""The layout of a run with other hosts: this host learns, and each GPU of the others has an engine.

    this host   its first GPUs learn, one for each rank; the first one also acts, if it runs episodes
    others      an engine on each GPU, or one on the CPU; the host's simulators are dealt to them
    learners    if they are named, their GPUs or CPUs learn, and do not act

Pure: no process is asked.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Final

import msgspec
from msgspec.structs import replace

from vla_rl.cluster.hosts import Host, HostResources
from vla_rl.cluster.layout import EnginePlace, Layout, RankPlace, SimulatorsPlace, shares
from vla_rl.cluster.layout_config import Needs
from vla_rl.cluster.layout_needs import require_memory
from vla_rl.cluster.rank_places import gpus_that_learn, rank_places
from vla_rl.cluster.roles import GpuRole
from vla_rl.errors import ConfigError

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


class RunShape(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a run that decide its layout."""

    num_envs: int
    """Environments on each host that runs episodes."""

    kinds: dict[str, int] = {}
    """Environments of each kind, which add up to `num_envs`; empty if all are of one kind. Each engine
    gets some of every kind."""

    num_ranks: int = 1
    plays_here: bool = False
    """Whether this host also runs episodes."""

    uses_gpus: bool = True
    """False if the run computes on CPUs alone."""

    spans_gpus: bool = False
    """Whether the engine of a host distributes itself over all of its GPUs, as vLLM's do."""

    learners: tuple[str, ...] = ()
    """Hosts and GPUs that learn instead of acting; empty if all ranks are on this host."""

    group_size: int = 1
    """Ranks that share each layer, and have to be on one host."""

    lost: tuple[tuple[str, int], ...] = ()
    """GPUs that no rank may use."""


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """One engine on another host, with its share of the simulators there."""

    host: Host
    """The host with the GPUs of this engine alone; named `gpu2`, or `gpu2:3` if it has several."""

    num_envs: int
    kinds: dict[str, int] = {}
    """Environments of each kind, if there are several."""


def usable(host: Host, shape: RunShape) -> Host:
    """Return a host with what such a run uses of it."""
    gpus = host.resources.gpus if shape.uses_gpus else ()
    if host.placement is None and not shape.learners:
        gpus = gpus[: shape.num_ranks]
    return replace(host, resources=replace(host.resources, gpus=gpus))


def seats_of(host: Host, shape: RunShape) -> tuple[Seat, ...]:
    """Return the engines of another host, each with its GPUs and simulators.

    It has none if all of it learns.

    Raises: ConfigError with the inequality if they are more than the host's environments.
    """
    host, placement = usable(host, shape), host.placement
    assert placement is not None
    gpus, learning = host.resources.gpus, gpus_that_learn_of(host, shape)
    if learning is not None:
        gpus = tuple(gpu for index, gpu in enumerate(gpus) if index not in learning)
        if not gpus:
            return ()
    if not gpus:
        return (Seat(host=host, num_envs=shape.num_envs, kinds=shape.kinds),)
    parts = [gpus] if shape.spans_gpus else [(gpu,) for gpu in gpus]
    dealt = _dealt(shape, len(parts), host.name)
    return tuple(
        Seat(
            host=Host(
                name=host.name if len(parts) == 1 else f"{host.name}:{number}",
                resources=replace(host.resources, gpus=part),
                placement=replace(
                    placement,
                    env={
                        **placement.env,
                        VISIBLE: ",".join(gpu.device or str(number) for gpu in part),
                    },
                ),
            ),
            num_envs=sum(counts.values()),
            kinds=counts if shape.kinds else {},
        )
        for number, (part, counts) in enumerate(zip(parts, dealt, strict=True))
    )


def _dealt(shape: RunShape, num_engines: int, host: str) -> list[dict[str, int]]:
    """Return the environments of each engine of a host, by kind.

    Raises: ConfigError with the inequality if an engine would have none of a kind.
    """
    dealt: list[dict[str, int]] = [{} for _ in range(num_engines)]
    for turn, (kind, number) in enumerate((shape.kinds or {"": shape.num_envs}).items()):
        if number < num_engines:
            name, what = (
                (f"{kind}.num_envs", "none of them") if kind else ("num_envs", "no environment")
            )
            raise ConfigError(
                f"{name}={number} < {num_engines} engines on host {host!r}, one for each GPU: one "
                f'would have {what}; raise it, or list fewer GPUs (gpus = "0-{number - 1}")'
            )
        counts = shares([Fraction(1)] * num_engines, number)
        # from the other end by turns, so that no engine gets one more of every kind
        for engine, count in zip(dealt, counts[:: -1 if turn % 2 else 1], strict=True):
            engine[kind] = count
    return dealt


def gpus_that_learn_of(host: Host, shape: RunShape) -> frozenset[int] | None:
    """Return the GPUs of another host that learn; None if it does not learn."""
    return gpus_that_learn(host.name, len(host.resources.gpus), shape.learners)


def require_fit(host: Host, shape: RunShape, needs: Needs) -> None:
    """Raise ConfigError with the inequality if another host has too little memory to act."""
    host = usable(host, shape)
    learning = gpus_that_learn_of(host, shape)
    num_envs = shape.num_envs if seats_of(host, shape) else 0
    roles = [
        GpuRole(host.name, index, learns=False, acts=True)
        for index in range(len(host.resources.gpus))
        if learning is None or index not in learning
    ]
    require_memory(needs, [host], roles, {host.name: num_envs})


def layout_of_run(hosts: Sequence[Host], shape: RunShape, needs: Needs | None = None) -> Layout:
    """Return who does what on each host.

    Args:
        hosts: this host, then the others.
        shape: settings of the run.
        needs: memory that is compared with what the other hosts have; None for no comparison.

    Raises: ConfigError with the inequality and the host, if it cannot be placed.
    """
    here, *others = (usable(host, shape) for host in hosts)
    ranks = _ranks(here, others, shape)
    engines: list[EnginePlace] = []
    if shape.plays_here:
        first = (0,) if here.resources.gpus else ()
        engines.append(EnginePlace(engine=0, host=here.name, gpus=first))
    for host in others:
        if needs is not None:
            require_fit(host, shape, needs)
        learning = gpus_that_learn_of(host, shape) or frozenset()
        indices = [each for each in range(len(host.resources.gpus)) if each not in learning]
        for number, _ in enumerate(seats_of(host, shape)):
            gpus = tuple(indices) if shape.spans_gpus else tuple(indices[number : number + 1])
            engines.append(EnginePlace(engine=len(engines), host=host.name, gpus=gpus))
    if not engines:
        raise ConfigError(
            f"cluster.learners {' '.join(shape.learners)!r} leaves no GPU and no CPU of another host "
            "to act; let fewer learn, or set --cluster.plays-here"
        )
    acting = {engine.host for engine in engines}
    return Layout(
        mode="both" if shape.plays_here else "apart",
        hosts=tuple(host.name for host in (here, *others)),
        ranks=ranks,
        engines=tuple(engines),
        simulators=tuple(
            SimulatorsPlace(host=host.name, num_simulators=shape.num_envs)
            for host in (here, *others)
            if host.name in acting
        ),
    )


def _ranks(here: Host, others: Sequence[Host], shape: RunShape) -> tuple[RankPlace, ...]:
    if shape.learners:
        return rank_places(
            shape.learners,
            [here, *others],
            shape.num_ranks,
            group_size=shape.group_size,
            lost=shape.lost,
        )
    return tuple(
        RankPlace(rank=rank, host=here.name, gpu=_gpu_of(rank, here.resources))
        for rank in range(shape.num_ranks)
    )


def _gpu_of(rank: int, here: HostResources) -> int | None:
    return rank if rank < len(here.gpus) else None
