"""Lines that a resumed run undoes: they move from their file to one beside it."""

from collections.abc import Callable
from pathlib import Path

from vla_rl.graph import AppendedFile
from vla_rl.observe.whole_file import write_whole


def set_aside_lines(path: Path, is_kept: Callable[[bytes], bool]) -> None:
    """Move the lines that are not kept to `<name>-undone<suffix>`; nothing is deleted.

    An incomplete last line is moved too.

    Raises: OSError; the file is then unchanged.
    """
    kept, undone = list[bytes](), list[bytes]()
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        (kept if line.endswith(b"\n") and is_kept(line) else undone).append(line)
    if not undone:
        return
    aside = AppendedFile(path.with_name(f"{path.stem}-undone{path.suffix}"), lines=True)
    aside.write(b"".join(undone).rstrip(b"\n") + b"\n", sync=True)
    aside.close()
    write_whole(path, b"".join(kept))
