"""The environment that children of this process begin with, also while a library needs another one here for a while.

`borrowed_environment` changes variables that belong to the whole process. Children that are started by
`inherited_environment` meanwhile get what was there before; what others set meanwhile stays as they set it.
"""

import os
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

_lock = threading.Lock()
_borrowed: list["_Borrowed"] = []


class _Borrowed:
    """Variables that belong to a borrower: those that it names, and all that begin as its library's do."""

    def __init__(self, names: set[str], prefixes: tuple[str, ...]) -> None:
        self._names, self._prefixes = names, prefixes
        self._before = {name: value for name, value in os.environ.items() if self._is_theirs(name)}

    def put_back(self, variables: MutableMapping[str, str]) -> None:
        """Make its variables what they were before it."""
        for name in [name for name in variables if self._is_theirs(name) and name not in self._before]:
            del variables[name]
        variables.update(self._before)

    def _is_theirs(self, name: str) -> bool:
        return name in self._names or name.startswith(self._prefixes)


@contextmanager
def borrowed_environment(values: Mapping[str, str], prefixes: tuple[str, ...]) -> Iterator[None]:
    """Set variables of this process while the block runs. One block at a time.

    Args:
        values: set at the beginning, and put back at the end.
        prefixes: how the names begin that the block's own work may set; those are put back too.
    """
    with _lock:
        borrowed = _Borrowed(set(values), prefixes)
        _borrowed.append(borrowed)
        os.environ.update(values)
    try:
        yield
    finally:
        with _lock:
            borrowed.put_back(os.environ)
            _borrowed.remove(borrowed)


def inherited_environment() -> dict[str, str]:
    """This process's variables, for a child of it: without what a block of `borrowed_environment` has set."""
    with _lock:
        variables = dict(os.environ)
        for borrowed in _borrowed:
            borrowed.put_back(variables)
        return variables
