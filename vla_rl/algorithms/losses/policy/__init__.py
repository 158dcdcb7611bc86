"""Policy losses, a file for each family. A file declares its losses; this package imports all of them."""

import pkgutil
from importlib import import_module

from vla_rl.algorithms.losses.declaration import declared_losses

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

LOSSES = declared_losses()
"""Every policy loss, by the name that a configuration uses."""
