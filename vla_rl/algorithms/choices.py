"""Things that a config picks by name, refused with the nearest match where the name is unknown."""

import difflib
from collections.abc import Collection, Mapping
from typing import TypeVar

from vla_rl.errors import ConfigError

T = TypeVar("T")


def chosen(table: Mapping[str, T], name: str, kind: str) -> T:
    """`table[name]`. Raises: ConfigError with the nearest match and all names, for a `kind` that is not there."""
    check_choice(table, name, kind)
    return table[name]


def check_choice(names: Collection[str], name: str, kind: str) -> None:
    """Raise ConfigError with the nearest match unless `name` is one of `names`."""
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f" did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{kind} {name!r} is unknown;{hint} known are: {', '.join(sorted(names))}.")
