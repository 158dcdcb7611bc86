"""Images of MuJoCo on every EGL device and on the CPU, by one process, one a core, and two a core.

Keys, for `osmesa`, which draws on the CPU, and for each EGL device by its number, `egl 0`, ...:
    1, N, 2 N    images a second of this number of processes together; N is the number of cores
    difference   mean difference of its image from OSMesa's, in grey levels of 255
    apart        share of its pixels that differ by more than 16 levels; goal of all devices < 0.02
    fault        why it draws nothing
and `most_apart`, the largest share of a device.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from vla_rl.errors import ConfigError

if TYPE_CHECKING:  # imports torch, which drawing does not need
    from benchmarks.gpu.campaign.target import Target

DRAWING: Final = "benchmarks.gpu.campaign.draw_images"

MEASURED_S: Final = 1.5

LARGE_LEVELS: Final = 16
"""Edges are smoothed by every driver in its own way; a texture, a light or an object that is another
changes more."""

MOST_DEVICES: Final = 16


def measure(target: "Target") -> Iterator[tuple[str, object]]:
    """Draw on the CPU and on each device."""
    if find_spec("mujoco") is None:
        raise ConfigError("MuJoCo is not installed, and the campaign needs no simulator")
    yield "osmesa", figures(target, {"MUJOCO_GL": "osmesa"}, "osmesa")
    shares: list[float] = []
    for number in range(MOST_DEVICES):
        chosen = {"MUJOCO_GL": "egl", "MUJOCO_EGL_DEVICE_ID": str(number)}
        found = figures(target, chosen, f"egl-{number}")
        if "expected 0 to" in str(found.get("fault", "")):
            break  # the last device had the number before
        found |= differences(target, f"egl-{number}")
        shares += [float(found["apart"])] if "apart" in found else []
        yield f"egl {number}", found
    if shares:
        yield "most_apart", max(shares)


def figures(target: "Target", variables: Mapping[str, str], name: str) -> dict[str, float | str]:
    """Return the rates of a device, or why it draws nothing."""
    file, cores = target.folder / f"image-{name}.npy", os.cpu_count() or 1
    found: dict[str, float | str] = {}
    for number in (1,) if target.is_tiny else (1, cores, 2 * cores):
        try:
            found[str(number)] = rate(
                number, variables, file, 0.05 if target.is_tiny else MEASURED_S
            )
        except ConfigError as error:
            return {**found, "fault": str(error)}
    return found


def rate(number: int, variables: Mapping[str, str], file: Path, seconds: float) -> float:
    """Return the images a second of processes that draw at the same time.

    Raises: ConfigError with the last words of one that cannot.
    """
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", DRAWING, str(seconds), str(file)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **variables},
                )
            )
            for _ in range(number)
        ]
        # leaving a process waits for its end
        stack.callback(_end, processes)
        for process in processes:
            if _line_of(process) != "ready":
                assert process.stderr is not None
                lines = process.stderr.read().strip().splitlines()
                raise ConfigError(lines[-1] if lines else f"it ended with {process.wait()}")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return sum(float(_line_of(process)) for process in processes)


def differences(target: "Target", name: str) -> dict[str, float]:
    """Compare a device's image with OSMesa's; nothing if one of them is missing."""
    files = [target.folder / f"image-{each}.npy" for each in ("osmesa", name)]
    if not all(file.exists() for file in files):
        return {}
    expected, actual = (np.load(file).astype(np.int64) for file in files)
    levels = np.abs(expected - actual)
    return {
        "difference": float(levels.mean()),
        "apart": float((levels.max(axis=-1) > LARGE_LEVELS).mean()),
    }


def _line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _end(processes: "Sequence[subprocess.Popen[str]]") -> None:
    for process in processes:
        process.kill()
