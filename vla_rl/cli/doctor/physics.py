"""MuJoCo that gives LIBERO's physics, and LIBERO's assets."""

import base64
import hashlib
import os
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import vla_rl
from vla_rl.cli.doctor.finding import Finding, Patient, not_finished
from vla_rl.cli.doctor.trial import try_apart
from vla_rl.envs.libero.assets import WHEELS, install_command
from vla_rl.errors import CheckpointError

SHIPPED: Final = Path(vla_rl.__file__).parent / "assets"
MANIFEST: Final = "manifest.json"
PROBE: Final = "from vla_rl.envs.libero.probe import probe_physics; probe_physics()"


def bowl_that_settles(patient: Patient) -> Iterable[Finding]:
    """Check that the bowl of libero_spatial task 5 comes to rest as in published results."""
    if find_spec("libero") is None:
        yield Finding(
            "LIBERO is not installed",
            "Its recipes cannot start",
            "Run `vla-rl install libero`, if you need them",
            "warning",
        )
        return
    settled = try_apart(["-c", PROBE], patient.seconds)
    if settled.is_late:
        yield not_finished("the fall of LIBERO's bowl", patient.seconds)
    elif settled.words.startswith("FileNotFoundError: "):
        lacking = settled.words.removeprefix("FileNotFoundError: ").rstrip(".")
        yield Finding(lacking, "LIBERO's tasks cannot start", "See the error's remedy")
    elif not settled.worked:
        yield Finding(
            f"LIBERO's physics is not that of published results ({settled.words})",
            "Success rates would be some points off, without an error",
            'Run `pip install "mujoco>=3.3.0,<3.3.3"`, and use LIBERO\'s own assets',
        )


def assets_with_digests(patient: Patient) -> Iterable[Finding]:
    """Check the digests of shipped policies, of LIBERO's asset packages, and the chosen folder."""
    for folder in sorted(path.parent for path in SHIPPED.glob(f"*/{MANIFEST}")):
        yield from _of_folder(folder)
    for wheel in WHEELS:
        name = damaged_in_wheel(wheel)
        if name is not None:
            yield Finding(
                f"{name} of the package {wheel} is damaged or missing",
                "LIBERO's tasks that show it look different, or cannot start",
                f"Run `{install_command([wheel], again=True)}`",
            )
    if find_spec("libero") is None:
        return
    from vla_rl.envs.libero.assets import STAND_INS, find_assets

    os.environ["VLA_RL_STAND_INS_ANNOUNCED"] = "1"  # said below, as a finding
    try:
        found = find_assets()
    except FileNotFoundError as error:
        yield Finding(str(error).rstrip("."), "LIBERO cannot start", "See the error's remedy")
    else:
        if found.source == STAND_INS:
            yield Finding(
                "LIBERO's own meshes and textures are not installed; stand-ins take their place",
                "Results are not comparable with published ones",
                "Run `vla-rl install assets`, unless you use the policy that ships",
                "warning",
            )


def _of_folder(folder: Path) -> Iterable[Finding]:
    from vla_rl.util.atomic_folder import verify_folder  # imports torch

    try:
        verify_folder(folder)
    except CheckpointError as error:
        yield Finding(
            f"a policy that ships is damaged: {str(error).rstrip('.')}",
            "It would act at random, or not load",
            "Install vla_rl again, or `git checkout` the file",
        )


def damaged_in_wheel(name: str) -> str | None:
    """Return the first file of an installed package that its record contradicts; None if there is
    none, or no such package.
    """
    try:
        files = Distribution.from_name(name).files or []
    except PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        if file.hash is None:
            continue
        if not path.is_file() or (file.size is not None and path.stat().st_size != file.size):
            return str(file)
        with path.open("rb") as content:
            found = hashlib.file_digest(content, file.hash.mode).digest()
        if base64.urlsafe_b64encode(found).rstrip(b"=").decode() != file.hash.value:
            return str(file)
    return None
