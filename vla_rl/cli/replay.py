"""Look into a replay buffer: `vla-rl replay show|check|export FOLDER`.

vla-rl replay show RUN                  what is in it, by task and by source
vla-rl replay check RUN                 read every byte; name the files that are damaged or missing
vla-rl replay export RUN rows.npz       all rows as arrays by column, for NumPy
vla-rl replay export RUN FOLDER         its episodes as a LeRobotDataset, one frame a decision, without images

RUN is the folder of a run, or of a buffer itself. No command changes the folder, and a run may be using
it. Rows have features of images, and no images: `--run.record-to` records episodes as a LeRobotDataset.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.table import Table

from vla_rl.errors import DataError, VlaRlError
from vla_rl.replay.segments import (
    SegmentHeader,
    find_buffer,
    list_segments,
    read_header,
    read_segment,
)
from vla_rl.run.terminal import lasting_output
from vla_rl.util.atomic_files import replacing
from vla_rl.util.values import plain_console

TASK_NAMES: Final = "task_names"
"""Array of an exported file that the column `task` counts."""


def find_segments(folder: Path) -> list[Path]:
    """Return the segments of a buffer, oldest first. Raises: DataError if there are none."""
    buffer = find_buffer(folder)
    found = list_segments(buffer)
    if not found:
        is_named = not buffer.is_relative_to(folder)
        where = f"{buffer}, which {folder} keeps its rows in," if is_named else folder
        raise DataError(
            f"{where} has no rows, expected the folder of a run with a replay buffer, or of the buffer; "
            "give another folder."
        )
    return found


def read_rows(paths: Sequence[Path]) -> Iterator[tuple[SegmentHeader, np.ndarray]]:
    """Read segments of one layout. Raises: DataError for a damaged one, and for another layout."""
    first: SegmentHeader | None = None
    for path in paths:
        header, _, rows = read_segment(path)
        first = first or header
        if difference := first.layout.describe_difference(header.layout):
            raise DataError(
                f"{path} is of another policy than the first file: {difference}; move one of the two kinds "
                "to a folder of its own."
            )
        yield header, rows


def describe_rows(paths: Sequence[Path]) -> Table:
    """Return a table with a line for each task and source. Raises: as `read_rows`."""
    counts: dict[tuple[str, str], np.ndarray] = defaultdict(lambda: np.zeros(5, np.int64))
    for header, rows in read_rows(paths):
        kind = "demonstrations" if header.is_demonstration else "episodes"
        # imported rows name a folder, and a run's own its id
        is_folder = "/" in header.source
        origin = f"{kind} of {header.source if is_folder else f'run {header.source[:8]}'}"
        for number, task in enumerate(header.tasks):
            part = rows[rows["task"] == number]
            num_episodes = len(np.unique(part["episode"]))
            counts[task, origin] += (
                num_episodes,
                num_episodes * header.is_success,
                len(part),
                int(part["intervened"].any(axis=1).sum()),
                int(part["has_expert"].sum()),
            )
    table = Table("task", "origin", "episodes", "successes", "rows", "intervened", "labelled")
    for (task, origin), numbers in sorted(counts.items()):
        table.add_row(task, origin, *map(str, numbers))
    table.add_section()
    table.add_row("all", "", *map(str, sum(counts.values(), np.zeros(5, np.int64))))
    return table


def show(folder: Path) -> int:
    """Print what a buffer holds; return the exit status."""
    paths = find_segments(folder)
    header, _ = read_header(paths[0])
    layout = header.layout
    num_bytes = sum(path.stat().st_size for path in paths)
    print(
        f"{len(paths)} files, {num_bytes / 1e6:.1f} MB; {layout.kind} head over the base "
        f"{layout.base_digest[:12]}\na row: {layout.features} features ({layout.features_dtype}), "
        f"{layout.proprio} of the robot's state, {layout.action} of the action, {layout.horizon} control steps"
    )
    plain_console().print(describe_rows(paths))
    return 0


def check(folder: Path) -> int:
    """Read every file, and print those that are damaged or missing; return 1 if there are any."""
    paths, damaged = find_segments(folder), 0
    for path in paths:
        try:
            next(read_rows([path]))
        except DataError as error:
            damaged += 1
            print(error)
    from vla_rl.learner.off_policy.run_replay import list_missing_segments  # imports torch

    missing = list_missing_segments(folder, paths)
    for number in missing:
        print(f"file {number} is missing: a checkpoint of {folder} names it, and cannot be resumed")
    print(f"{len(paths) - damaged} of {len(paths) + len(missing)} files are whole")
    return 1 if damaged or missing else 0


def export(folder: Path, out: Path) -> int:
    """Write all rows as one `.npz` file of columns, or as a LeRobotDataset; return the exit status."""
    try:
        return _write_export(folder, out)
    except OSError as error:  # of writing; what cannot be read is a DataError
        where = error.filename or out
        raise DataError(
            f"{out} cannot be written ({where}: {error.strerror}), expected a place in a folder that exists and "
            "has room; make the folder, or name another one."
        ) from error


def _write_export(folder: Path, out: Path) -> int:
    if not out.suffix:
        from vla_rl.replay.exporting import export_lerobot  # needs pyarrow

        # all are read before the first is written, so that a damaged one leaves no half of a data set
        paths = find_segments(folder)
        for _ in read_rows(paths):
            pass
        print(f"{out}: {export_lerobot(paths[0].parent, out)} new episodes")
        return 0
    if out.suffix != ".npz" or out.exists():
        fault = "is there already" if out.exists() else "has another suffix"
        raise DataError(f"{out} {fault}, expected the name of a new .npz file, or of a folder.")
    tasks: list[str] = []
    parts = []
    for header, rows in read_rows(find_segments(folder)):
        tasks += [task for task in header.tasks if task not in tasks]
        rows["task"] = np.array([tasks.index(task) for task in header.tasks])[rows["task"]]
        parts.append(rows)
    dtype: Any = parts[0].dtype
    columns: dict[str, Any] = {
        name: np.concatenate([rows[name] for rows in parts]) for name in dtype.names
    }
    columns[TASK_NAMES] = np.array(tasks, np.str_)
    with replacing(out) as part, part.open("wb") as file:
        np.savez(file, **columns)
    print(f"{out}: {len(columns['episode'])} rows, columns {', '.join(columns)}")
    return 0


@lasting_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="vla-rl replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="show|check|export")
    known: dict[str, tuple[Callable[..., int], str]] = {
        "show": (show, "print what the buffer holds"),
        "check": (check, "read every file and name those that are damaged or missing"),
        "export": (export, "write the rows for NumPy, or as a LeRobotDataset"),
    }
    for name, (function, about) in known.items():
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("folder", type=Path, help="of a run, or of a buffer")
        if name == "export":
            command.add_argument(
                "out",
                type=Path,
                help="new file, such as rows.npz, or the folder of a LeRobotDataset",
            )
        command.set_defaults(function=function)
    options = vars(parser.parse_args(arguments))
    try:
        status: int = options.pop("function")(**options)
    except (VlaRlError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
