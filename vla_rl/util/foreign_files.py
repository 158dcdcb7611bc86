"""Files that another program wrote: whatever a library raises about one becomes one error that names
it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

MOST_SHOWN: Final = 300
"""Characters of a library's message that an error shows."""


@contextmanager
def reading_file(path: Path, fault: str, remedy: str) -> Iterator[None]:
    """Turn the error of a reader into one that names the file; one that does passes as it is.

    Args:
        fault: what is wrong, such as " is no scene file"; it follows the file's name.
        remedy: what to do, such as "export it again".

    Raises: ValueError.
    """
    try:
        yield
    except MemoryError as error:
        raise ValueError(
            f"{path}{fault}: it claims more memory than there is; {remedy}."
        ) from error
    except (
        Exception
    ) as error:  # no list is complete: zipfile, zlib, NumPy, expat each have their own
        if isinstance(error, ValueError) and str(error).startswith(str(path)):
            raise
        words = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        shown = words if len(words) <= MOST_SHOWN else f"{words[:MOST_SHOWN]}..."
        raise ValueError(f"{path}{fault}: {kind}{shown}; {remedy}.") from error
