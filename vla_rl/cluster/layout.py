"""A layout: which learner rank, engine, simulators are on which host or GPU.

GPUs of several hosts are named in one word, as Slurm writes lists of hosts: `node[1-4]:0-5,7`. The memory
that a layout needs is compared with what each GPU or host has. `--dry-run` prints a line for each range of
GPUs with one role. `plan_run_layout` makes a run's layout.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Literal

import msgspec

from vla_rl.cluster.hosts import Host
from vla_rl.errors import ConfigError

_WORD = re.compile(r"(?P<host>[^\[\]:]+|[^\[\]:]*\[[^\[\]]+\][^\[\]:]*)(:(?P<gpus>[0-9,-]+))?")
_MOST = 100_000


class GpuRange(msgspec.Struct, frozen=True):
    """Some or all GPUs of one host."""

    host: str
    gpus: tuple[int, ...] | None
    """Indices on that host; None for all of its GPUs."""


def parse_gpu_range(word: str) -> tuple[GpuRange, ...]:
    """Return what `host`, `host:0-5` or `node[1-4]:0-5` names, a part for each host.

    Numbers in brackets keep their leading zeros: `node[08-10]` is node08, node09 and node10.

    Raises: ConfigError if the word has another form, or names a GPU twice.
    """
    found = _WORD.fullmatch(word)
    if found is None:
        raise ConfigError(
            f"{word!r} names no GPUs, expected HOST, HOST:0-5 or node[1-4]:0-5; a host's numbers "
            "are in brackets, its GPUs after a colon"
        )
    gpus = found["gpus"]
    indices = None if gpus is None else tuple(int(each) for each in _list_numbers(gpus, word))
    twice = [index for index in indices or () if (indices or ()).count(index) > 1]
    if twice:
        raise ConfigError(f"{word!r} names GPU {twice[0]} twice, expected once")
    before, bracket, rest = found["host"].partition("[")
    if not bracket:
        return (GpuRange(before, indices),)
    numbers, _, after = rest.partition("]")
    return tuple(
        GpuRange(f"{before}{each}{after}", indices) for each in _list_numbers(numbers, word)
    )


def format_indices(indices: tuple[int, ...]) -> str:
    """Return rising indices in the shortest form, such as `0-5,7`."""
    parts: list[tuple[int, int]] = []
    for index in indices:
        if parts and parts[-1][1] == index - 1:
            parts[-1] = (parts[-1][0], index)
        else:
            parts.append((index, index))
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in parts)


def _list_numbers(text: str, word: str) -> Iterator[str]:
    for part in text.split(","):
        low, dash, high = part.partition("-")
        is_range = low.isdecimal() and (high.isdecimal() if dash else True)
        # A slip such as 0-99999999 would make a list that fills the memory.
        if not is_range or (dash and not int(low) <= int(high) < int(low) + _MOST):
            raise ConfigError(
                f"{part!r} in {word!r} is no range, expected a number or two with a dash, the "
                "lower one first, such as 0-5"
            )
        # Slurm's habit: the names of machines have leading zeros, and `node8` is another machine.
        width = len(low) if low.startswith("0") else 0
        for number in range(int(low), int(high or low) + 1):
            yield f"{number:0{width}d}"


class RankDevice(msgspec.Struct, frozen=True, kw_only=True):
    """The device of one learner rank.

    Example:
        RankDevice(rank=3, host="gpu2", gpu=1)
    """

    rank: int
    host: str
    gpu: int | None
    """Index on its host; None for the CPU."""


class EngineDevices(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of one engine.

    Example:
        EngineDevices(engine=0, host="gpu2", gpus=(4, 5))     # tensor parallel on two GPUs
    """

    engine: int
    host: str
    gpus: tuple[int, ...]
    """Indices on its host, several for tensor parallelism; empty for the CPU."""


class HostSimulators(msgspec.Struct, frozen=True, kw_only=True):
    """The simulators of one host."""

    host: str
    num_simulators: int


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Places of all ranks, engines and simulators of a run."""

    mode: Literal["apart", "both"]
    """Whether engines are on other GPUs than the learner, or on its GPUs too."""

    hosts: tuple[str, ...]
    ranks: tuple[RankDevice, ...]
    engines: tuple[EngineDevices, ...]
    simulators: tuple[HostSimulators, ...]
    """Hosts with at least one simulator."""

    def ranks_on(self, host: str) -> tuple[RankDevice, ...]:
        """Return the learner ranks of a host."""
        return tuple(device for device in self.ranks if device.host == host)

    def engines_on(self, host: str) -> tuple[EngineDevices, ...]:
        """Return the engines of a host."""
        return tuple(device for device in self.engines if device.host == host)

    def num_simulators_on(self, host: str) -> int:
        """Return the number of simulators of a host."""
        return sum(device.num_simulators for device in self.simulators if device.host == host)


def shares(weights: Sequence[Fraction], total: int) -> list[int]:
    """Return whole parts of `total` in proportion to `weights`, at least 1 each, by largest rests.

    Args:
        weights: positive numbers.
        total: at least as many as there are weights.
    """
    # Fractions: with floats the parts would depend on rounding, and two plans of one run might differ.
    whole = sum(weights)
    parts = [total * weight // whole for weight in weights]
    by_rest = sorted(range(len(weights)), key=lambda each: (-(total * weights[each] % whole), each))
    for each in by_rest[: total - sum(parts)]:
        parts[each] += 1
    # An engine without a simulator would hold a GPU and never be asked.
    while 0 in parts:
        parts[parts.index(max(parts))] -= 1
        parts[parts.index(0)] += 1
    return parts


class GpuRole(msgspec.Struct, frozen=True):
    """The role of one GPU, or of a host's CPU if no host has a GPU."""

    host: str
    gpu: int | None
    learns: bool
    acts: bool


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that the parts of a run need; 0 is not checked.

    Estimates come from the caller: this room knows no policy.
    """

    learning_bytes: int = 0
    """GPU memory of a learner rank alone."""

    acting_bytes: int = 0
    """GPU memory of an engine on each of its GPUs."""

    both_bytes: int = 0
    """GPU memory of a rank and an engine on one GPU; less than their sum if they share weights."""

    simulator_bytes: int = 0
    """Host memory of one simulator."""

    rank_host_bytes: int = 0
    """Host memory of a learner rank."""


GIB = 2**30


def require_memory(
    needs: Needs, hosts: Sequence[Host], roles: Sequence[GpuRole], simulators: Mapping[str, int]
) -> None:
    """Raise ConfigError with the inequality if a GPU or a host has too little memory."""
    for host in hosts:
        of_host = [role for role in roles if role.host == host.name]
        for role in of_host:
            if role.gpu is not None:
                _require_gpu(needs, host, role, role.gpu)
        num_ranks = sum(role.learns for role in of_host)
        _require_host(needs, host, num_ranks, simulators.get(host.name, 0))


def _require_gpu(needs: Needs, host: Host, role: GpuRole, index: int) -> None:
    needed, what = needs.acting_bytes, "an engine"
    remedy = "leave it out of the hosts' GPUs, or take another GPU"
    if role.learns:
        remedy = "take more learner ranks, the mode 'apart', or another GPU"
        needed, what = needs.learning_bytes, "a learner rank"
    if role.learns and role.acts:
        needed, what = needs.both_bytes, "a learner rank and an engine"
    gpu = host.resources.gpus[index]
    if needed > gpu.memory_bytes:
        raise ConfigError(
            f"GPU {index} ({gpu.name}) of host {host.name!r} has {gpu.memory_bytes / GIB:.1f} GiB, "
            f"expected >= {needed / GIB:.1f} for {what}; {remedy}"
        )


def _require_host(needs: Needs, host: Host, num_ranks: int, num_simulators: int) -> None:
    simulators, ranks = num_simulators * needs.simulator_bytes, num_ranks * needs.rank_host_bytes
    has = host.resources.memory_bytes
    if simulators + ranks > has:
        raise ConfigError(
            f"host {host.name!r} has {has / GIB:.1f} GiB of memory, expected >= "
            f"{(simulators + ranks) / GIB:.1f}: {num_simulators} simulators of "
            f"{needs.simulator_bytes / GIB:.2f} + {num_ranks} learner ranks of "
            f"{needs.rank_host_bytes / GIB:.2f}; run fewer simulators, or add hosts"
        )


def format_layout(layout: Layout) -> str:
    """Return who does what on each host and GPU, as aligned text."""
    rows = [("host", "GPUs", "learn", "act", "simulators")]
    for host in layout.hosts:
        rows += _make_rows(layout, host)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    total = sum(device.num_simulators for device in layout.simulators)
    return "\n".join(
        [
            f"layout {layout.mode}: {_format_count(len(layout.ranks), 'learner rank')}, "
            f"{_format_count(len(layout.engines), 'engine')}, {_format_count(total, 'simulator')} on "
            f"{_format_count(len(layout.hosts), 'host')}",
            *(f"  {line}" for line in lines),
        ]
    )


def _make_rows(layout: Layout, host: str) -> list[tuple[str, str, str, str, str]]:
    ranks: dict[int | None, list[RankDevice]] = {}
    for device in layout.ranks_on(host):  # a CPU may have several
        ranks.setdefault(device.gpu, []).append(device)
    engines = {gpu: device for device in layout.engines_on(host) for gpu in device.gpus or (None,)}
    simulators = str(layout.num_simulators_on(host) or "-")
    # A line for each range with one role: a node of eight GPUs is one line, as a user thinks of it.
    gpus = sorted({*ranks, *engines}, key=lambda gpu: -1 if gpu is None else gpu)
    parts: list[list[int | None]] = []
    for gpu in gpus:
        role = (gpu in ranks, gpu in engines)
        if parts and (parts[-1][0] in ranks, parts[-1][0] in engines) == role:
            parts[-1].append(gpu)
        else:
            parts.append([gpu])
    rows = [
        (
            host if number == 0 else "",
            format_indices(tuple(gpu for gpu in part if gpu is not None)) or "CPU",
            _format_numbers("rank", [device.rank for gpu in part for device in ranks.get(gpu, [])]),
            _format_numbers("engine", [engines[gpu].engine for gpu in part if gpu in engines]),
            simulators if number == 0 else "",
        )
        for number, part in enumerate(parts)
    ]
    return rows or [(host, "-", "-", "-", simulators)]


def _format_numbers(word: str, numbers: Sequence[int]) -> str:
    indices = tuple(dict.fromkeys(numbers))
    if not indices:
        return "-"
    return f"{word}{'s' if len(indices) > 1 else ''} {format_indices(indices)}"


def _format_count(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
