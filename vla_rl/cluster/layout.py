"""The layout of a run: which learner rank, engine and simulators are on which host and GPU.

    config, hosts ──► roles of each GPU ──► ranks and engines ──► simulators by cores ──► Layout
                      (together, apart, both)

Pure: the same hosts in the same order give the same layout, and no process is asked. A layout that
cannot work is refused with the inequality, which names the host.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import msgspec
from msgspec.structs import replace

from vla_rl.cluster.hosts import Host
from vla_rl.cluster.layout_config import LayoutConfig, Needs
from vla_rl.cluster.layout_needs import require_memory
from vla_rl.cluster.roles import GpuRole, roles_of
from vla_rl.errors import ConfigError


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one learner rank."""

    rank: int
    host: str
    gpu: int | None
    """Index on its host; None for the CPU."""


class EnginePlace(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one engine."""

    engine: int
    host: str
    gpus: tuple[int, ...]
    """Indices on its host, several for tensor parallelism; empty for the CPU."""


class SimulatorsPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The simulators of one host."""

    host: str
    num_simulators: int


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Places of all ranks, engines and simulators of a run."""

    mode: Literal["together", "apart", "both"]
    hosts: tuple[str, ...]
    ranks: tuple[RankPlace, ...]
    engines: tuple[EnginePlace, ...]
    simulators: tuple[SimulatorsPlace, ...]
    """Hosts with at least one simulator."""

    def ranks_on(self, host: str) -> tuple[RankPlace, ...]:
        """Return the learner ranks of a host."""
        return tuple(place for place in self.ranks if place.host == host)

    def engines_on(self, host: str) -> tuple[EnginePlace, ...]:
        """Return the engines of a host."""
        return tuple(place for place in self.engines if place.host == host)

    def num_simulators_on(self, host: str) -> int:
        """Return the number of simulators of a host."""
        return sum(place.num_simulators for place in self.simulators if place.host == host)


def layout_of(
    config: LayoutConfig,
    hosts: Sequence[Host],
    *,
    num_simulators: int,
    needs: Needs | None = None,
) -> Layout:
    """Return the layout of a run.

    If no host has a GPU, each host's CPU counts as one. If some have, a host without is for
    simulators alone. A host whose GPUs only learn has no simulators.

    Args:
        config: the mode, and which GPUs learn.
        hosts: hosts of the run; ranks and engines are numbered in their order.
        num_simulators: simulators on all hosts, dealt in proportion to the cores beside GPUs that
            act, and to those of hosts without GPUs.
        needs: memory that is compared with what the hosts have; None for no comparison.

    Raises: ConfigError with the inequality and the host, if it cannot be placed.
    """
    roles = roles_of(config, hosts)
    learning = [role for role in roles if role.learns]
    layout = Layout(
        mode=config.mode,
        hosts=tuple(host.name for host in hosts),
        ranks=tuple(
            RankPlace(rank=number, host=role.host, gpu=role.gpu)
            for number, role in enumerate(learning)
        ),
        engines=_engines(roles, config.gpus_per_engine),
        simulators=_simulators(hosts, roles, num_simulators),
    )
    if needs is not None:
        counts = {place.host: place.num_simulators for place in layout.simulators}
        require_memory(needs, hosts, roles, counts)
    return layout


def layout_with(
    layout: Layout,
    hosts: Sequence[Host],
    joined: Host,
    config: LayoutConfig,
    needs: Needs | None = None,
) -> Layout:
    """Return the layout after a host joined: its GPUs act, and nothing that runs is moved.

    It never learns, because the ranks of a running learner are fixed until its next start. It gets
    as many simulators for each core as the hosts with simulators have, at least one.

    Args:
        layout: the layout so far.
        hosts: the hosts of `layout`.
        joined: the host that is new.
        config: the configuration of `layout`.
        needs: memory that is compared with what the new host has; None for no comparison.
    """
    if joined.name in layout.hosts:
        raise ConfigError(f"host {joined.name!r} joined twice, expected a name of its own")
    on_gpus = any(host.resources.gpus for host in hosts)
    gpus: Sequence[int | None] = range(len(joined.resources.gpus)) if on_gpus else (None,)
    roles = tuple(GpuRole(joined.name, gpu, learns=False, acts=True) for gpu in gpus)
    first = 1 + max((place.engine for place in layout.engines), default=-1)
    places = _engines(roles, config.gpus_per_engine)
    engines = tuple(replace(place, engine=first + place.engine) for place in places)
    num_simulators = _simulators_for(layout, hosts, joined)
    if needs is not None:
        require_memory(needs, [joined], roles, {joined.name: num_simulators})
    return replace(
        layout,
        hosts=(*layout.hosts, joined.name),
        engines=(*layout.engines, *engines),
        simulators=(
            *layout.simulators,
            SimulatorsPlace(host=joined.name, num_simulators=num_simulators),
        ),
    )


def _simulators_for(layout: Layout, hosts: Sequence[Host], joined: Host) -> int:
    cores = sum(host.resources.num_cores for host in hosts if layout.num_simulators_on(host.name))
    total = sum(place.num_simulators for place in layout.simulators)
    return max(1, round(total * joined.resources.num_cores / max(cores, 1)))


def _engines(roles: Sequence[GpuRole], gpus_per_engine: int) -> tuple[EnginePlace, ...]:
    places: list[EnginePlace] = []
    for host in dict.fromkeys(role.host for role in roles):
        acting = [role.gpu for role in roles if role.host == host and role.acts]
        if acting == [None]:
            places.append(EnginePlace(engine=len(places), host=host, gpus=()))
            continue
        if len(acting) % gpus_per_engine:
            raise ConfigError(
                f"host {host!r} has {len(acting)} GPUs that act, expected a multiple of "
                f"gpus_per_engine={gpus_per_engine}, because an engine cannot span hosts; change "
                "gpus_per_engine or the GPUs that learn"
            )
        gpus = [gpu for gpu in acting if gpu is not None]
        for start in range(0, len(gpus), gpus_per_engine):
            chosen = tuple(gpus[start : start + gpus_per_engine])
            places.append(EnginePlace(engine=len(places), host=host, gpus=chosen))
    return tuple(places)


def _simulators(
    hosts: Sequence[Host], roles: Sequence[GpuRole], num_simulators: int
) -> tuple[SimulatorsPlace, ...]:
    acting = {role.host for role in roles if role.acts}
    learning = {role.host for role in roles if role.learns}
    # a host whose GPUs only learn keeps its memory and network for what ranks fetch
    chosen = [host for host in hosts if host.name in acting or host.name not in learning]
    if num_simulators < len(chosen):
        raise ConfigError(
            f"num_simulators={num_simulators} < {len(chosen)} hosts for simulators: "
            f"{chosen[-1].name!r} would have none; raise the number of simulators, or leave hosts "
            "out"
        )
    counts = shares([_cores_for_simulators(host, roles) for host in chosen], num_simulators)
    return tuple(
        SimulatorsPlace(host=host.name, num_simulators=count)
        for host, count in zip(chosen, counts, strict=True)
    )


def _cores_for_simulators(host: Host, roles: Sequence[GpuRole]) -> Fraction:
    """Return the cores of a host, less those beside GPUs that only learn."""
    acts = [role.acts for role in roles if role.host == host.name] or [True]
    # all cores counted, 6 acting GPUs of one host got as many episodes as 8 of the next, and 64 GPUs
    # of which 50 learn had an efficiency of 0.82 instead of 0.99
    return Fraction(max(host.resources.num_cores, 1) * sum(acts), len(acts))


def shares(weights: Sequence[Fraction], total: int) -> list[int]:
    """Return whole parts of `total` in proportion to `weights`, at least 1 each, by largest rests.

    Args:
        weights: positive numbers.
        total: at least as many as there are weights.
    """
    whole = sum(weights)
    parts = [total * weight // whole for weight in weights]
    by_rest = sorted(range(len(weights)), key=lambda each: (-(total * weights[each] % whole), each))
    for each in by_rest[: total - sum(parts)]:
        parts[each] += 1
    while 0 in parts:
        parts[parts.index(max(parts))] -= 1
        parts[parts.index(0)] += 1
    return parts
