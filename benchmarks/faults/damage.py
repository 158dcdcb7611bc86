"""Damaged run directories: bits flipped, files cut, emptied, removed or overwritten before a
resume.
"""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.faults.leftovers import nothing_left
from benchmarks.faults.one_try import Try
from benchmarks.faults.toy_run import ToyRun, check_books, tail

_UPDATES: Final = 6
_FURTHER: Final = 2


class DamagedRuns:
    """Damages copies of one finished run, which the first try makes."""

    def __init__(self, folder: Path) -> None:
        self._original = folder / "origin"

    def __call__(self, case: Try) -> None:
        """Damage one or two files, then resume: the run has to continue from intact files, or stop
        with one message.
        """
        with nothing_left(case):
            run_folder = self._copy_for(case)
            damaged = [_damage_one(case.dice, run_folder) for _ in range(case.dice.randint(1, 2))]
            with ToyRun(
                case, _UPDATES + _FURTHER, "--resume", str(run_folder), root=run_folder.parent
            ) as run:
                status = run.until_ended()
            words = f"after damage to {', '.join(damaged)}:\n{tail(run, 30)}"
            case.expect(status in (0, 1, 2), f"exit status {status} {words}")
            case.expect("Traceback" not in run.output(), f"a traceback {words}")
            if status == 0 and not any("metrics.jsonl" in name for name in damaged):
                check_books(case, run_folder, _UPDATES + _FURTHER)

    def _copy_for(self, case: Try) -> Path:
        if not self._original.is_dir():
            with ToyRun(case, _UPDATES, root=case.folder / "origin") as run:
                status = run.until_ended()
                case.expect(
                    status == 0 and run.folder is not None, f"no run to damage:\n{tail(run)}"
                )
            assert run.folder is not None
            shutil.copytree(run.folder, self._original / run.folder.name)
        (original,) = self._original.iterdir()
        return Path(shutil.copytree(original, case.folder / "runs" / original.name))


def _damage_one(dice: random.Random, folder: Path) -> str:
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and "tensorboard" not in path.parts
    )
    path = dice.choice(files)
    harm = dice.choice(_HARMS)
    harm(dice, path)
    return f"{path.relative_to(folder)} ({harm.__name__.lstrip('_')})"


def _flip_a_bit(dice: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(data)


def _cut(dice: random.Random, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: dice.randrange(len(data) + 1)])


def _empty(dice: random.Random, path: Path) -> None:
    path.write_bytes(b"")


def _remove(dice: random.Random, path: Path) -> None:
    path.unlink()


def _overwrite(dice: random.Random, path: Path) -> None:
    path.write_bytes(dice.randbytes(200))


_HARMS: Final[tuple[Callable[[random.Random, Path], None], ...]] = (
    _flip_a_bit,
    _cut,
    _empty,
    _remove,
    _overwrite,
)
