"""The result of a stage, as a file."""

import os
from pathlib import Path
from typing import Any

import msgspec


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one stage, whole or cut."""

    stage: str
    is_tiny: bool

    is_whole: bool = False
    """Whether the stage came to its end."""

    figures: dict[str, Any] = {}
    seconds: float = 0.0
    left_out: str = ""
    """Why this machine does not suit the stage."""

    failure: str = ""
    """Last words of a stage that failed or was cut."""

    packages: dict[str, str] = {}
    """Versions of the packages that it used."""


def finished_file(folder: Path, stage: str) -> Path:
    """Return the file of a finished stage."""
    return folder / f"{stage}.json"


def part_file(folder: Path, stage: str) -> Path:
    """Return the file of a stage that runs, failed, or was cut."""
    return folder / f"{stage}.part.json"


def write_found(file: Path, found: Found) -> None:
    """Replace the file, so that it is whole whenever it is there."""
    new_file = file.with_suffix(".new")
    new_file.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    os.replace(new_file, file)


def read_found(file: Path) -> Found | None:
    """Read a file; None if it is not there."""
    if not file.exists():
        return None
    return msgspec.json.decode(file.read_bytes(), type=Found)
