"""A layout as text, for `--dry-run`: a line for each range of GPUs with one role."""

from collections.abc import Sequence

from vla_rl.cluster.gpu_ranges import spell_indices
from vla_rl.cluster.layout import EnginePlace, Layout, RankPlace


def layout_table(layout: Layout) -> str:
    """Return who does what on each host and GPU, as aligned text."""
    rows = [("host", "GPUs", "learn", "act", "simulators")]
    for host in layout.hosts:
        rows += _rows_of(layout, host)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    total = sum(place.num_simulators for place in layout.simulators)
    return "\n".join(
        [
            f"layout {layout.mode}: {_counted(len(layout.ranks), 'learner rank')}, "
            f"{_counted(len(layout.engines), 'engine')}, {_counted(total, 'simulator')} on "
            f"{_counted(len(layout.hosts), 'host')}",
            *(f"  {line}" for line in lines),
        ]
    )


def _rows_of(layout: Layout, host: str) -> list[tuple[str, str, str, str, str]]:
    ranks: dict[int | None, list[RankPlace]] = {}
    for place in layout.ranks_on(host):  # a CPU may have several
        ranks.setdefault(place.gpu, []).append(place)
    engines = {gpu: place for place in layout.engines_on(host) for gpu in place.gpus or (None,)}
    simulators = str(layout.num_simulators_on(host) or "-")
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
            spell_indices(tuple(gpu for gpu in part if gpu is not None)) or "CPU",
            _ranks([place for gpu in part for place in ranks.get(gpu, [])]),
            _engines([engines[gpu] for gpu in part if gpu in engines]),
            simulators if number == 0 else "",
        )
        for number, part in enumerate(parts)
    ]
    return rows or [(host, "-", "-", "-", simulators)]


def _ranks(places: Sequence[RankPlace]) -> str:
    return _spelt("rank", [place.rank for place in places])


def _engines(places: Sequence[EnginePlace]) -> str:
    return _spelt("engine", [place.engine for place in places])


def _spelt(word: str, numbers: Sequence[int]) -> str:
    indices = tuple(dict.fromkeys(numbers))
    if not indices:
        return "-"
    return f"{word}{'s' if len(indices) > 1 else ''} {spell_indices(indices)}"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
