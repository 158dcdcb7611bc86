"""Results of held-out episodes are on disk line by line, and each version has its own."""

from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from vla_rl.errors import ConfigError
from vla_rl.evaluation.held_out_book import HeldOutBook, HeldOutRow, RowFormat, set_aside_rows
from vla_rl.types import EnvSpec, EpisodeSpec


def row_in(line: bytes) -> HeldOutRow:
    version, number, value = line.split()
    return HeldOutRow(int(version), ("toy", int(number), 0), float(value))


def no_line(version: int, trajectory: Any) -> bytes:
    raise AssertionError("no trajectory is written here")


NUMBERS = RowFormat(
    file="numbers",
    measure="score",
    line_of=no_line,
    row_in=row_in,
    key_of=lambda episode: ("toy", episode.episode_id, 0),
    table_of=lambda lines: Text(""),
)


def episode(number: int) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id=number,
        group_id=0,
        member=0,
        env=EnvSpec(id="none"),
        task="toy",
        seed=0,
        policy_seed=0,
    )


async def test_a_line_is_on_disk_when_it_was_added(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    book = HeldOutBook(file, NUMBERS)
    await book.add(b"4 0 0.5")
    await book.add(b"4 1 1\n")
    assert file.read_bytes() == b"4 0 0.5\n4 1 1\n"
    again = HeldOutBook(file, NUMBERS)
    assert again.rows == book.rows
    assert again.lines == [b"4 0 0.5", b"4 1 1"]


async def test_what_is_missing_is_by_version(tmp_path: Path) -> None:
    book = HeldOutBook(tmp_path / "numbers", NUMBERS)
    await book.add(b"4 0 1")
    episodes = [episode(0), episode(1)]
    assert book.missing(4, episodes) == [episodes[1]]
    assert book.missing(5, episodes) == episodes


def test_a_torn_last_line_is_left_out_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    file.write_bytes(b"4 0 1\n4 1")
    assert len(HeldOutBook(file, NUMBERS).rows) == 1
    file.write_bytes(b"4 0 1\n4 one 1\n")
    with pytest.raises(ConfigError, match=r"numbers, line 2 is not a result: .* remove that line"):
        HeldOutBook(file, NUMBERS)


def test_lines_of_later_weights_are_set_aside_and_a_damaged_one_stays(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    file.write_bytes(b"4 0 1\n6 0 1\nfive\n5 0 1\n")
    set_aside_rows(file, NUMBERS, last=5)
    assert file.read_bytes() == b"4 0 1\nfive\n5 0 1\n"
    assert (tmp_path / "numbers-undone").read_bytes() == b"6 0 1\n"
