"""Scorers that a user writes, such as `my_module:score`: looked for before a run starts, called in its sandbox.

    def score(reply: str, row: dict) -> float

The function runs in a process of its own and never in this one, so that it may hang or crash.
"""

import functools
import inspect
import logging
import math
import pkgutil
from importlib.util import find_spec
from typing import Any, Final

from vla_rl.errors import ConfigError, EnvError
from vla_rl.sandbox import CallResult, ProcessLimits, Sandbox, SandboxConfig

CALLED_AS: Final = "it is called as `(reply: str, row: dict) -> float`"

_log = logging.getLogger(__name__)


def require_path(path: str) -> None:
    """Raise ConfigError unless a path is `module:function`, of a module that can be found from here.

    The module is not imported.
    """
    module, _, function = path.partition(":")
    if not all(name.isidentifier() for name in [*module.split("."), *function.split(".")]):
        raise ConfigError(f"scorer {path!r}, expected `module:function`, such as my_module:score")
    outermost = module.partition(".")[0]
    if outermost != "__main__" and find_spec(outermost) is None:
        raise ConfigError(
            f"scorer {path!r}: there is no module {outermost!r}; run from its folder, or name that "
            "folder in PYTHONPATH"
        )


async def check_own_scorer(path: str, config: SandboxConfig | None = None) -> None:
    """Import a scorer in a sandbox, and look whether it can be called; it is not called.

    Raises: ConfigError if the module fails, the function is missing, or takes other arguments.
    """
    require_path(path)
    async with Sandbox(config) as sandbox:
        # Here and not in the call, whose limits are made for one reply.
        await sandbox.preload(path.partition(":")[0])
        result = await sandbox.call(f"{__name__}:require_scorer", {"path": path}, ProcessLimits())
    if result.fault is not None and result.fault != "not_isolated":
        raise ConfigError(f"scorer {path!r}: {result.text}; {CALLED_AS}")


def require_scorer(path: str) -> None:
    """Raise TypeError unless a path leads to a function that takes a reply and its row."""
    found = pkgutil.resolve_name(path)
    if not callable(found):
        raise TypeError(f"it is not callable but {type(found).__name__}")
    if inspect.iscoroutinefunction(found):
        raise TypeError("it is an `async def`, expected a plain function")
    try:
        signature = inspect.signature(found)
    except ValueError:  # of a function in C, which may have none
        return
    signature.bind(reply="", row={})


def read_score(path: str, result: CallResult) -> float:
    """Return the score that a user's function returned; 0 for one that hung or crashed, with a warning.

    Raises: EnvError if it raised, or returned anything but a finite number.
    """
    if result.fault == "raised":
        raise EnvError(f"scorer {path!r} raised {result.text}; {CALLED_AS}")
    if result.fault is not None:
        _warn_of_fault(path, result.text)
        return 0.0
    value: Any = result.value
    if not isinstance(value, int | float):
        raise EnvError(f"scorer {path!r} returned {value!r}, expected a number")
    if not math.isfinite(value):
        raise EnvError(f"scorer {path!r} returned {value}, expected a finite number")
    return float(value)


@functools.lru_cache(maxsize=64)
def _warn_of_fault(path: str, words: str) -> None:
    """Warn, once for each fault of a scorer."""
    _log.warning(
        "scorer %r: %s; such a reply scores 0, and the metrics text/calls/... count them",
        path,
        words,
    )
