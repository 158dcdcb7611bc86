"""The places of a run's learner ranks on the hosts that `cluster.learners` names.

    here:0-1 gpu2:0-1   ──►   rank 0 here:0   rank 1 here:1   rank 2 gpu2:0   rank 3 gpu2:1

One rank for each GPU, in the order of the names; ranks on CPUs are dealt evenly. Pure.
"""

import difflib
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import TypeAlias

from vla_rl.cluster.gpu_ranges import GpuRange, parse_gpu_range
from vla_rl.cluster.host_file import HERE
from vla_rl.cluster.hosts import Host
from vla_rl.cluster.layout import RankPlace, shares
from vla_rl.errors import ConfigError

Lost: TypeAlias = Collection[tuple[str, int]]
"""GPUs that no rank may use: the host's name in `cluster.learners`, and the GPU's index there."""


def learner_ranges(learners: Sequence[str]) -> tuple[GpuRange, ...]:
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


def gpus_that_learn(name: str, num_gpus: int, learners: Sequence[str]) -> frozenset[int] | None:
    """Return the GPUs of a host that learn; None if the host does not learn."""
    for part in learner_ranges(learners):
        if part.host == name:
            return frozenset(range(num_gpus) if part.gpus is None else part.gpus)
    return None


def rank_places(
    learners: Sequence[str],
    hosts: Sequence[Host],
    num_ranks: int,
    *,
    group_size: int = 1,
    lost: Lost = (),
) -> tuple[RankPlace, ...]:
    """Return the place of each rank.

    Args:
        learners: the hosts that learn, in ranges; `here` is the first of `hosts`.
        hosts: this host, then the others, with the GPUs that a run may use.
        num_ranks: number of ranks.
        group_size: ranks that share each layer, and have to be on one host.
        lost: GPUs that no rank may use.

    Raises: ConfigError for a host or a GPU that is not there, and with the inequality for too few.
    """
    by_name = dict(zip([HERE, *(host.name for host in hosts[1:])], hosts, strict=True))
    ranges = learner_ranges(learners)
    for part in ranges:
        _require_there(part, by_name)
    chosen = [by_name[part.host] for part in ranges]
    have_gpus = [bool(host.resources.gpus) for host in chosen]
    if any(have_gpus) and not all(have_gpus):
        without = ranges[have_gpus.index(False)].host
        raise ConfigError(
            f"cluster.learners names {without!r}, which has no GPU, beside hosts that have some: all "
            "ranks compute on GPUs, or all on CPUs; leave it out, or set --run.device cpu"
        )
    if not any(have_gpus):
        return _dealt_to_cpus(chosen, num_ranks, group_size)
    places = [
        (host.name, gpu)
        for part, host in zip(ranges, chosen, strict=True)
        for gpu in (range(len(host.resources.gpus)) if part.gpus is None else part.gpus)
        if (part.host, gpu) not in lost
    ]
    if num_ranks > len(places):
        raise ConfigError(
            f"learner.ranks is {num_ranks}, but cluster.learners {' '.join(learners)!r} names "
            f"{len(places)} GPUs; expected at most one rank for each"
        )
    found = tuple(
        RankPlace(rank=rank, host=host, gpu=gpu)
        for rank, (host, gpu) in enumerate(places[:num_ranks])
    )
    _require_groups_on_one_host(found, group_size)
    return found


def without_hosts(learners: Sequence[str], lost: Collection[str]) -> tuple[str, ...]:
    """Return `cluster.learners` without some hosts."""
    return tuple(
        part.host if part.gpus is None else f"{part.host}:{','.join(map(str, part.gpus))}"
        for part in learner_ranges(learners)
        if part.host not in lost
    )


def _dealt_to_cpus(hosts: Sequence[Host], num_ranks: int, group_size: int) -> tuple[RankPlace, ...]:
    num_groups = num_ranks // group_size
    used = list(hosts)[:num_groups]
    counts = shares([Fraction(1)] * len(used), num_groups)
    names = [
        host.name
        for host, count in zip(used, counts, strict=True)
        for _ in range(count * group_size)
    ]
    return tuple(RankPlace(rank=rank, host=name, gpu=None) for rank, name in enumerate(names))


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


def _require_groups_on_one_host(places: Sequence[RankPlace], group_size: int) -> None:
    for first in range(0, len(places), group_size):
        hosts = [place.host for place in places[first : first + group_size]]
        if len(set(hosts)) > 1:
            raise ConfigError(
                f"learner.tensor_parallel is {group_size}, and ranks {first} to "
                f"{first + group_size - 1} would be on {hosts[0]!r} and {hosts[-1]!r}, expected "
                f"all on one host; name a multiple of {group_size} GPUs of each host"
            )
