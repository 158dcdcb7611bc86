"""Lines that a resumed run undoes: they move from their file to one beside it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from vla_rl.graph import AppendedFile
from vla_rl.reporting.whole_file import write_whole

_MOST_NAMED = 10


def set_aside_lines(path: Path, is_kept: Callable[[bytes], bool]) -> None:
    """Move the lines that are not kept to `<name>-undone<suffix>`; nothing is deleted.

    A line that `is_kept` calls damaged, or a last one that a kill cut off, is moved too, and one
    printed line says so.

    Args:
        path: a file of one object a line.
        is_kept: returns whether a line stays; raises ValueError for a damaged one that moves.

    Raises: OSError; the file is then unchanged.
    """
    kept, undone, damaged = list[bytes](), list[bytes](), list[int]()
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        whole = line if line.endswith(b"\n") else line + b"\n"
        try:
            if whole is not line:  # a kill may have cut it off anywhere
                msgspec.json.decode(line, type=dict[str, Any])
            (kept if is_kept(line) else undone).append(whole)
        except (ValueError, RecursionError):  # not JSON, no object, not UTF-8, or another's
            undone.append(whole)
            damaged.append(number)
    if not undone and b"".join(kept) == b"".join(lines):
        return
    aside = path.with_name(f"{path.stem}-undone{path.suffix}")
    if undone:
        appended = AppendedFile(aside, lines=True)
        appended.write(b"".join(undone), sync=True)
        appended.close()
    write_whole(path, b"".join(kept))
    if damaged:
        print(f"{path}: {_named(damaged)} damaged, moved to {aside.name}", flush=True)


def _named(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"line {numbers[0]} is"
    more = f" and {len(numbers) - _MOST_NAMED} more" if len(numbers) > _MOST_NAMED else ""
    return f"lines {', '.join(map(str, numbers[:_MOST_NAMED]))}{more} are"
