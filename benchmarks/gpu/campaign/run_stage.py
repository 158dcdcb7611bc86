"""The run of one stage: it writes what it finds, figure by figure.

`NAME.part.json` holds the figures so far and becomes `NAME.json` at the end, so that a stage that is
cut leaves what it has found.
"""

import importlib
import importlib.metadata
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.gpu.campaign.found import Found, finished_file, part_file, write_found
from benchmarks.gpu.campaign.target import Target
from benchmarks.gpu.campaign.updating import WAYS, measure as measure_update
from vla_rl.errors import ConfigError


def run_stage(name: str, folder: Path, *, is_tiny: bool) -> Found:
    """Run a stage in this process. Raises what the stage raises."""
    device = torch.device("cpu" if is_tiny else "cuda")
    target, began = Target(device, is_tiny, folder), time.perf_counter()
    found = Found(stage=name, is_tiny=is_tiny)
    try:
        with target.compiler():
            for key, value in _figures(name, target):
                seconds = time.perf_counter() - began
                figures = {**found.figures, key: value}
                found = msgspec.structs.replace(found, figures=figures, seconds=seconds)
                write_found(part_file(folder, name), found)
    except ConfigError as error:
        # the machine does not suit the stage: an answer, not a failure
        found = msgspec.structs.replace(found, left_out=str(error))
    found = msgspec.structs.replace(found, is_whole=True, packages=loaded_packages())
    write_found(finished_file(folder, name), found)
    part_file(folder, name).unlink(missing_ok=True)
    return found


def _figures(name: str, target: Target) -> Iterator[tuple[str, Any]]:
    if name in WAYS:
        return measure_update(target, WAYS[name])
    module = importlib.import_module(f"benchmarks.gpu.campaign.{name}")
    figures: Iterator[tuple[str, Any]] = module.measure(target)
    return figures


def loaded_packages() -> dict[str, str]:
    """Return the versions of the packages whose modules are loaded."""
    packages_of = _distributions_of_modules()
    loaded = {module.partition(".")[0] for module in sys.modules}
    names = {name for module in loaded for name in packages_of.get(module, ())}
    return {name: _version_of(name) for name in sorted(names)}


# both read files of every installed package, which no stage changes
_distributions_of_modules = cache(importlib.metadata.packages_distributions)
_version_of = cache(importlib.metadata.version)
