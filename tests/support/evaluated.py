"""Records of evaluated episodes, as tests need them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from vla_rl.evaluation import EpisodeRecord


def evaluated(
    task: str = "libero_goal/7", start: int = 0, is_success: bool = True, **changed: Any
) -> EpisodeRecord:
    """A success or a failure from a start."""
    fields = {
        "seed": 0,
        "weights": 0,
        "member": 0,
        "value": float(is_success),
        "parts": {"steps": 100.0, "attempts": 1.0},
        "instruction": "turn on the stove",
    }
    return EpisodeRecord(task=task, start=start, **{**fields, **changed})


def scored(weights: int, start: int, value: float, **parts: float) -> EpisodeRecord:
    """A score of a drive."""
    return EpisodeRecord(
        task="driving", start=start, seed=0, weights=weights, member=0, value=value, parts=parts
    )


def as_lines(records: Iterable[EpisodeRecord]) -> bytes:
    """What the file of these records holds."""
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


def write_records(path: Path, records: Iterable[EpisodeRecord]) -> None:
    path.write_bytes(as_lines(records))
