"""Runs the stages that are missing, one process after the other, as long as there is time.

    for each stage    its file is there ─► nothing to do          (so a cut campaign goes on)
                      too little time   ─► left for the next call
                      else              ─► a process; a crash or a limit ends that stage alone

The page and its JSON are written anew after every stage.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from benchmarks.gpu.campaign.found import Found, finished_file, part_file, read_found, write_found
from benchmarks.gpu.campaign.page import write_page
from benchmarks.gpu.campaign.stages import STAGES, Stage
from vla_rl.errors import ConfigError

Launch: TypeAlias = Callable[[Stage, Path, bool, float], str]
"""Runs a stage for at most some seconds; returns its last words if it failed, else nothing."""

ROOT: Final = Path(__file__).parents[3]

LAST_LINES: Final = 12


def run_campaign(
    folder: Path, minutes: float, *, is_tiny: bool, launch: "Launch | None" = None
) -> list[Found]:
    """Run the stages that are missing in `folder`; return what is known now.

    Raises: ConfigError if the folder has stages of another size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _require_same_size(folder, is_tiny)
    run, ends_at = launch or launch_process, time.monotonic() + 60.0 * minutes
    for stage in STAGES:
        left = ends_at - time.monotonic()
        if finished_file(folder, stage.name).exists():
            print(f"{stage.name}: done before")
        elif left < stage.least_s and not is_tiny:
            print(
                f"{stage.name}: not begun, it needs {stage.least_s:.0f} s and {left:.0f} are left"
            )
        else:
            print(f"{stage.name}: {stage.title.lower()} ...", flush=True)
            # a tiny stage proves that it runs, however busy the machine is
            limit_s = left if is_tiny else min(left, stage.most_s)
            _run(stage, folder, is_tiny, limit_s, run)
        write_page(folder, _known(folder), is_tiny=is_tiny)
    return _known(folder)


def _run(stage: Stage, folder: Path, is_tiny: bool, limit_s: float, run: Launch) -> None:
    part = part_file(folder, stage.name)
    part.unlink(missing_ok=True)
    failure = run(stage, folder, is_tiny, limit_s)
    if not failure:
        return
    print(f"  {failure.splitlines()[-1]}")
    found = read_found(part) or Found(stage=stage.name, is_tiny=is_tiny)
    write_found(part, msgspec.structs.replace(found, failure=failure))


def launch_process(stage: Stage, folder: Path, is_tiny: bool, limit_s: float) -> str:
    """Run a stage in a process, which ends with all that it started after `limit_s`."""
    log = folder / f"{stage.name}.log"
    command = [sys.executable, "-m", "benchmarks.gpu.campaign.stage_process", stage.name]
    command += [str(folder.absolute()), str(os.getpid()), *(["tiny"] if is_tiny else [])]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        ) as process,
    ):
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"it was ended after {limit_s:.0f} s"
        finally:
            # also at Ctrl-C: a stage that is left behind would keep its GPU memory
            _end_group(process)
    if status == 0:
        return ""
    last = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join(last) or f"it ended with status {status}"


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _known(folder: Path) -> list[Found]:
    found = [
        read_found(finished_file(folder, stage.name)) or read_found(part_file(folder, stage.name))
        for stage in STAGES
    ]
    return [each for each in found if each is not None]


def _require_same_size(folder: Path, is_tiny: bool) -> None:
    sizes = {True: "tiny", False: "full"}
    for found in _known(folder):
        if found.is_tiny != is_tiny:
            raise ConfigError(
                f"{folder} has stages of {sizes[found.is_tiny]} size, expected "
                f"{sizes[is_tiny]}; give --out another folder"
            )
