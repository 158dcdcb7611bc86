"""GPUs of several hosts in one word, as Slurm writes lists of hosts: `node[1-4]:0-5,7`."""

import re
from collections.abc import Iterator

import msgspec

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
    indices = None if gpus is None else tuple(int(each) for each in _numbers(gpus, word))
    twice = [index for index in indices or () if (indices or ()).count(index) > 1]
    if twice:
        raise ConfigError(f"{word!r} names GPU {twice[0]} twice, expected once")
    before, bracket, rest = found["host"].partition("[")
    if not bracket:
        return (GpuRange(before, indices),)
    numbers, _, after = rest.partition("]")
    return tuple(GpuRange(f"{before}{each}{after}", indices) for each in _numbers(numbers, word))


def spell_indices(indices: tuple[int, ...]) -> str:
    """Return rising indices in the shortest form, such as `0-5,7`."""
    parts: list[tuple[int, int]] = []
    for index in indices:
        if parts and parts[-1][1] == index - 1:
            parts[-1] = (parts[-1][0], index)
        else:
            parts.append((index, index))
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in parts)


def _numbers(text: str, word: str) -> Iterator[str]:
    for part in text.split(","):
        low, dash, high = part.partition("-")
        is_range = low.isdecimal() and (high.isdecimal() if dash else True)
        if not is_range or (dash and not int(low) <= int(high) < int(low) + _MOST):
            raise ConfigError(
                f"{part!r} in {word!r} is no range, expected a number or two with a dash, the "
                "lower one first, such as 0-5"
            )
        width = len(low) if low.startswith("0") else 0
        for number in range(int(low), int(high or low) + 1):
            yield f"{number:0{width}d}"
