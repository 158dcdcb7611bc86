"""Makes `import vla_rl` enough for `gymnasium.make("vla_rl/<id>")`, in either order of the imports.

Since release 1.0, gymnasium loads no entry points: an id is known once a package is imported.
"""

import importlib
import sys
from types import ModuleType

from vla_rl.util.watched_imports import Execute, watch


def _execute(execute: Execute, module: ModuleType) -> None:
    execute(module)
    importlib.import_module("vla_rl.envs")


def install() -> None:
    """Register our environments with gymnasium: now if it has been imported, else with its import."""
    if "gymnasium" in sys.modules:
        importlib.import_module("vla_rl.envs")
    else:
        watch("gymnasium.envs", _execute)
