"""The environment variables that child processes inherit.

They do even while a library needs other ones here for a while.

`borrowed_environment` changes variables that belong to the whole process. Children started
meanwhile through `inherited_environment` get the earlier values; variables that other code sets
meanwhile keep their values.
"""

import os
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

_lock = threading.Lock()
_borrowed: list["_Borrowed"] = []


class _Borrowed:
    """Variables of a borrower: those that it names, and all with its library's prefixes."""

    def __init__(self, names: set[str], prefixes: tuple[str, ...]) -> None:
        self._names, self._prefixes = names, prefixes
        self._before = {name: value for name, value in os.environ.items() if self._is_theirs(name)}

    def put_back(self, variables: MutableMapping[str, str]) -> None:
        """Restore its variables to their earlier values."""
        for name in [
            name for name in variables if self._is_theirs(name) and name not in self._before
        ]:
            del variables[name]
        variables.update(self._before)

    def _is_theirs(self, name: str) -> bool:
        return name in self._names or name.startswith(self._prefixes)


@contextmanager
def borrowed_environment(values: Mapping[str, str], prefixes: tuple[str, ...]) -> Iterator[None]:
    """Set variables of this process while the block runs. One block at a time.

    Args:
        values: set at the beginning, and restored at the end.
        prefixes: prefixes of variables that the block's own work may set; those are restored too.
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
    """Return this process's variables for a child, without those that are borrowed.

    `borrowed_environment` borrows them.
    """
    with _lock:
        variables = dict(os.environ)
        for borrowed in _borrowed:
            borrowed.put_back(variables)
        return variables
