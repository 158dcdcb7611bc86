"""The plan of a run's layout on several hosts: this host learns, each GPU of the others has an engine.

    this host   its first GPUs learn, one for each rank; the first one also acts, if it runs episodes
    others      an engine on each GPU, or one on the CPU; the host's simulators are dealt to them
    learners    if they are named, their GPUs or CPUs learn, without acting:
                here:0-1 gpu2:0-1   ──►   rank 0 here:0   rank 1 here:1   rank 2 gpu2:0   rank 3 gpu2:1

One rank for each GPU, in the order of the names; ranks on CPUs are dealt evenly. Pure: no process is
asked.
"""

import difflib
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from vla_rl.cluster.host_file import LOCAL_HOST
from vla_rl.cluster.hosts import Host
from vla_rl.cluster.layout import (
    EngineDevices,
    GpuRange,
    GpuRole,
    HostSimulators,
    Layout,
    Needs,
    RankDevice,
    parse_gpu_range,
    require_memory,
    shares,
)
from vla_rl.errors import ConfigError

LostGpus: TypeAlias = Collection[tuple[str, int]]
"""GPUs that no rank may use: the host's name in `cluster.learners`, and the GPU's index there."""


def parse_learners(learners: Sequence[str]) -> tuple[GpuRange, ...]:
    """Return what `cluster.learners` names, a part for each host. Raises: ConfigError."""
    ranges = tuple(part for word in learners for part in parse_gpu_range(word))
    names = [part.host for part in ranges]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"cluster.learners names the host {name!r} {names.count(name)} times, expected once; "
                f"write its GPUs in one word, such as {name}:0-3,7"
            )
    return ranges


def find_learning_gpus(name: str, num_gpus: int, learners: Sequence[str]) -> frozenset[int] | None:
    """Return the GPUs of a host that learn; None if the host does not learn."""
    for part in parse_learners(learners):
        if part.host == name:
            return frozenset(range(num_gpus) if part.gpus is None else part.gpus)
    return None


def assign_ranks(
    learners: Sequence[str],
    hosts: Sequence[Host],
    num_ranks: int,
    *,
    group_size: int = 1,
    lost: LostGpus = (),
) -> tuple[RankDevice, ...]:
    """Return the device of each rank.

    Args:
        learners: the hosts that learn, in ranges; `here` is the first of `hosts`.
        hosts: this host, then the others, with the GPUs that a run may use.
        num_ranks: number of ranks.
        group_size: ranks that share each layer, and have to be on one host.
        lost: GPUs that no rank may use.

    Raises: ConfigError for a host or a GPU that is not there, and with the inequality for too few.
    """
    by_name = dict(zip([LOCAL_HOST, *(host.name for host in hosts[1:])], hosts, strict=True))
    ranges = parse_learners(learners)
    for part in ranges:
        _require_there(part, by_name)
    chosen = [by_name[part.host] for part in ranges]
    have_gpus = [bool(host.resources.gpus) for host in chosen]
    # A step takes as long as its slowest rank; one on a CPU would make all others wait.
    if any(have_gpus) and not all(have_gpus):
        without = ranges[have_gpus.index(False)].host
        raise ConfigError(
            f"cluster.learners names {without!r}, which has no GPU, beside hosts that have some: all "
            "ranks compute on GPUs, or all on CPUs; leave it out, or set --run.device cpu"
        )
    if not any(have_gpus):
        return _assign_to_cpus(chosen, num_ranks, group_size)
    devices = [
        (host.name, gpu)
        for part, host in zip(ranges, chosen, strict=True)
        for gpu in (range(len(host.resources.gpus)) if part.gpus is None else part.gpus)
        if (part.host, gpu) not in lost
    ]
    if num_ranks > len(devices):
        raise ConfigError(
            f"learner.ranks is {num_ranks}, but cluster.learners {' '.join(learners)!r} names "
            f"{len(devices)} GPUs; expected at most one rank for each"
        )
    found = tuple(
        RankDevice(rank=rank, host=host, gpu=gpu)
        for rank, (host, gpu) in enumerate(devices[:num_ranks])
    )
    _require_groups_on_one_host(found, group_size)
    return found


def remove_hosts(learners: Sequence[str], lost: Collection[str]) -> tuple[str, ...]:
    """Return `cluster.learners` without some hosts."""
    return tuple(
        part.host if part.gpus is None else f"{part.host}:{','.join(map(str, part.gpus))}"
        for part in parse_learners(learners)
        if part.host not in lost
    )


def _assign_to_cpus(
    hosts: Sequence[Host], num_ranks: int, group_size: int
) -> tuple[RankDevice, ...]:
    # Whole groups are dealt: the ranks that share a layer exchange activations at each of them.
    num_groups = num_ranks // group_size
    used = list(hosts)[:num_groups]
    counts = shares([Fraction(1)] * len(used), num_groups)
    names = [
        host.name
        for host, count in zip(used, counts, strict=True)
        for _ in range(count * group_size)
    ]
    return tuple(RankDevice(rank=rank, host=name, gpu=None) for rank, name in enumerate(names))


def _require_there(part: GpuRange, by_name: dict[str, Host]) -> None:
    if part.host not in by_name:
        near = difflib.get_close_matches(part.host, by_name, n=1) or list(by_name)[:1]
        raise ConfigError(
            f"cluster.learners names the host {part.host!r}, expected one of the {len(by_name)} "
            f"hosts of this run, such as {near[0]!r}"
        )
    count = len(by_name[part.host].resources.gpus)
    if part.gpus and max(part.gpus) >= count:
        there = f"GPUs 0 to {count - 1}" if count else "no GPU that this run uses"
        raise ConfigError(
            f"cluster.learners names GPU {max(part.gpus)} of host {part.host!r}, which has {there}; "
            "name GPUs that are there"
        )


def _require_groups_on_one_host(devices: Sequence[RankDevice], group_size: int) -> None:
    for first in range(0, len(devices), group_size):
        hosts = [device.host for device in devices[first : first + group_size]]
        if len(set(hosts)) > 1:
            raise ConfigError(
                f"learner.tensor_parallel is {group_size}, and ranks {first} to "
                f"{first + group_size - 1} would be on {hosts[0]!r} and {hosts[-1]!r}, expected "
                f"all on one host; name a multiple of {group_size} GPUs of each host"
            )


VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


class RunShape(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a run that decide its layout."""

    num_envs: int
    """Environments on each host that runs episodes."""

    kinds: dict[str, int] = {}
    """Environments of each kind, which add up to `num_envs`; empty if all are of one kind. Each engine
    gets some of every kind."""

    num_ranks: int = 1
    local_rollout: bool = False
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


class EngineAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """One engine on another host, with its share of the simulators there."""

    host: Host
    """The host with the GPUs of this engine alone; named `gpu2`, or `gpu2:3` if it has several."""

    num_envs: int
    kinds: dict[str, int] = {}
    """Environments of each kind, if there are several."""


def limit_to_used(host: Host, shape: RunShape) -> Host:
    """Return a host with what such a run uses of it."""
    gpus = host.resources.gpus if shape.uses_gpus else ()
    # This host's other GPUs belong to nobody in the run, so a layout must not promise them.
    if host.placement is None and not shape.learners:
        gpus = gpus[: shape.num_ranks]
    return replace(host, resources=replace(host.resources, gpus=gpus))


def assign_engines(host: Host, shape: RunShape) -> tuple[EngineAssignment, ...]:
    """Return the engines of another host, each with its GPUs and simulators.

    It has none if all of it learns.

    Raises: ConfigError with the inequality if they are more than the host's environments.
    """
    host, placement = limit_to_used(host, shape), host.placement
    assert placement is not None
    gpus, learning = host.resources.gpus, get_learning_gpus(host, shape)
    if learning is not None:
        gpus = tuple(gpu for index, gpu in enumerate(gpus) if index not in learning)
        if not gpus:
            return ()
    if not gpus:
        return (EngineAssignment(host=host, num_envs=shape.num_envs, kinds=shape.kinds),)
    parts = [gpus] if shape.spans_gpus else [(gpu,) for gpu in gpus]
    dealt = _deal_environments(shape, len(parts), host.name)
    return tuple(
        EngineAssignment(
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


def _deal_environments(shape: RunShape, num_engines: int, host: str) -> list[dict[str, int]]:
    """Return the environments of each engine of a host, by kind.

    Raises: ConfigError with the inequality if an engine would have none of a kind.
    """
    dealt: list[dict[str, int]] = [{} for _ in range(num_engines)]
    for turn, (kind, number) in enumerate((shape.kinds or {"": shape.num_envs}).items()):
        # Refused and not dealt: a kind that one engine lacks would be run by the others alone, unnoticed.
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


def get_learning_gpus(host: Host, shape: RunShape) -> frozenset[int] | None:
    """Return the GPUs of another host that learn; None if it does not learn."""
    return find_learning_gpus(host.name, len(host.resources.gpus), shape.learners)


def require_memory_to_act(host: Host, shape: RunShape, needs: Needs) -> None:
    """Raise ConfigError with the inequality if another host has too little memory to act."""
    host = limit_to_used(host, shape)
    learning = get_learning_gpus(host, shape)
    num_envs = shape.num_envs if assign_engines(host, shape) else 0
    roles = [
        GpuRole(host.name, index, learns=False, acts=True)
        for index in range(len(host.resources.gpus))
        if learning is None or index not in learning
    ]
    require_memory(needs, [host], roles, {host.name: num_envs})


def plan_run_layout(hosts: Sequence[Host], shape: RunShape, needs: Needs | None = None) -> Layout:
    """Return who does what on each host.

    Args:
        hosts: this host, then the others.
        shape: settings of the run.
        needs: memory that is compared with what the other hosts have; None for no comparison.

    Raises: ConfigError with the inequality and the host, if it cannot be placed.
    """
    local, *others = (limit_to_used(host, shape) for host in hosts)
    ranks = _assign_own_ranks(local, others, shape)
    engines: list[EngineDevices] = []
    if shape.local_rollout:
        first = (0,) if local.resources.gpus else ()
        engines.append(EngineDevices(engine=0, host=local.name, gpus=first))
    for host in others:
        if needs is not None:
            require_memory_to_act(host, shape, needs)
        learning = get_learning_gpus(host, shape) or frozenset()
        indices = [each for each in range(len(host.resources.gpus)) if each not in learning]
        for number, _ in enumerate(assign_engines(host, shape)):
            gpus = tuple(indices) if shape.spans_gpus else tuple(indices[number : number + 1])
            engines.append(EngineDevices(engine=len(engines), host=host.name, gpus=gpus))
    if not engines:
        raise ConfigError(
            f"cluster.learners {' '.join(shape.learners)!r} leaves no GPU and no CPU of another host "
            "to act; let fewer learn, or set --cluster.local-rollout"
        )
    # Simulators stand beside an engine: images would cross the network for each action otherwise.
    acting = {engine.host for engine in engines}
    return Layout(
        mode="both" if shape.local_rollout else "apart",
        hosts=tuple(host.name for host in (local, *others)),
        ranks=ranks,
        engines=tuple(engines),
        simulators=tuple(
            HostSimulators(host=host.name, num_simulators=shape.num_envs)
            for host in (local, *others)
            if host.name in acting
        ),
    )


def _assign_own_ranks(
    local: Host, others: Sequence[Host], shape: RunShape
) -> tuple[RankDevice, ...]:
    if shape.learners:
        return assign_ranks(
            shape.learners,
            [local, *others],
            shape.num_ranks,
            group_size=shape.group_size,
            lost=shape.lost,
        )
    num_gpus = len(local.resources.gpus)
    return tuple(
        RankDevice(rank=rank, host=local.name, gpu=rank if rank < num_gpus else None)
        for rank in range(shape.num_ranks)
    )
