"""Checks of compiled libraries: OpenGL, torch, torchvision, vLLM, MuJoCo with LIBERO's assets.

What may hang, crash, or leave something open is probed in a process of its own.
"""

import base64
import contextlib
import hashlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import Distribution, PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

import vla_rl
from vla_rl.cli.doctor.machine import CheckResult, Machine, not_finished
from vla_rl.envs.libero.assets import WHEELS, get_wheels_command as wheel_install_command
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.util.installing import install_command

MOST_CHARACTERS: Final = 300
"""Characters of a failed probe's output that a result quotes."""

_running_probes: Final[set[subprocess.Popen[str]]] = set()


class Probe(NamedTuple):
    """The end of a probe."""

    worked: bool
    output: str
    """Its output, or the reason why it failed."""

    is_late: bool = False
    """Whether it was killed at its time limit: it hangs, or the machine is busy."""

    lacks_instructions: bool = False
    """Whether it used instructions that this CPU does not have (SIGILL)."""


def run_probe(arguments: Sequence[str], seconds: float) -> Probe:
    """Run this Python with `arguments` in a process group of its own; kill the group at the time
    limit.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        # a library that asks something would wait for a terminal for ever
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        encoding="utf-8",
    )
    _running_probes.add(process)
    try:
        printed, complained = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return Probe(False, f"no answer within {seconds:.0f} s", is_late=True)
    finally:
        _kill_probe(process)
        process.communicate()
        _running_probes.discard(process)
    if process.returncode == 0:
        return Probe(True, printed.strip())
    if process.returncode == -signal.SIGILL:
        return Probe(
            False,
            "killed by SIGILL: it uses instructions that this CPU does not have",
            lacks_instructions=True,
        )
    if process.returncode < 0:
        return Probe(False, f"killed by {signal.Signals(-process.returncode).name}")
    lines = [line for line in complained.strip().splitlines() if line.strip()]
    return Probe(
        False, (lines[-1] if lines else f"exit status {process.returncode}")[:MOST_CHARACTERS]
    )


def kill_probes() -> None:
    """Kill the probes that still run."""
    for process in tuple(_running_probes):
        _kill_probe(process)


def _kill_probe(process: subprocess.Popen[str]) -> None:
    # forks of the probe too: one that hangs in OpenGL would stay for ever
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


DRAWING: Final = "vla_rl.cli.doctor.drawing"


def opengl_that_draws(machine: Machine) -> Iterable[CheckResult]:
    """Check that an image can be drawn off screen, and also in a process that was forked before.

    Simulators are such forks. The second is tried only if the first works.
    """
    drawn = run_probe(["-m", DRAWING, "here"], machine.seconds)
    if not drawn.worked:
        yield CheckResult(
            f"no image can be drawn ({drawn.output})",
            "Simulators with cameras (LIBERO, Meta-World) cannot start",
            "Run `apt-get install libegl1 libgl1` (or libosmesa6, on the CPU); unset MUJOCO_GL and "
            "MUJOCO_EGL_DEVICE_ID; a container needs NVIDIA_DRIVER_CAPABILITIES=all",
        )
        return
    if drawn.output == "osmesa":
        yield CheckResult(
            "images are drawn by OSMesa",
            "It draws on the CPU, and slower than EGL",
            "Run `apt-get install libegl1 libgl1`",
            "warning",
        )
    forked = run_probe(["-m", DRAWING, "fork"], machine.seconds)
    if not forked.worked:
        yield CheckResult(
            f"a forked process cannot draw ({forked.output})",
            "Simulators are forked from a server that has built the scenes; each would hang at its "
            "first image",
            "Look for a sitecustomize.py or .pth file that opens OpenGL or a GPU in every Python; "
            "or set --simulators.start spawn",
        )


_IMPORT: Final = "import sys; from vla_rl.cli.doctor import libraries; "
ATTENTION_PROBE: Final = f"{_IMPORT}libraries.compute_bidirectional_trunk()"
CAUSAL: Final = "attends causally"
LIBRARY_PROBE: Final = f"{_IMPORT}libraries.load_vllm_library(sys.argv[1])"


def torch_that_computes(machine: Machine) -> Iterable[CheckResult]:
    """Check that vision towers can be built and computed, which takes torch, torchvision and timm,
    and that OpenVLA-OFT's trunk attends in both directions with this transformers.
    """
    probed = run_probe(["-c", ATTENTION_PROBE], machine.seconds)
    if probed.is_late:
        yield not_finished("a small OpenVLA-OFT", machine.seconds)
    elif not probed.worked and CAUSAL in probed.output:
        yield CheckResult(
            f"OpenVLA-OFT's trunk does not attend in both directions ({probed.output})",
            "OpenVLA-OFT loses tens of points of success without an error",
            "Install the pinned release: `pip install 'transformers>=5.16.1,<5.20'`; remove code "
            "that changes its attention",
        )
    elif not probed.worked:
        yield CheckResult(
            f"a vision tower cannot be computed ({probed.output})",
            "No OpenVLA policy can be loaded",
            "Install builds of torch and torchvision of one release together: "
            "`pip install torch==2.13.* torchvision==0.28.*`, both from the same index",
        )


def compute_bidirectional_trunk() -> None:
    """Compute a small OpenVLA-OFT. Raises: ConfigError if it attends causally."""
    # first: the imports below take seconds before one of them asks for torchvision
    import_module("torchvision")

    import torch

    from vla_rl.models.openvla_oft.network import OpenVlaOftNetwork
    from vla_rl.models.prismatic.config import tiny
    from vla_rl.models.prismatic.trunk import require_bidirectional

    config = tiny()
    network = OpenVlaOftNetwork(config).eval()
    size = config.image_size
    with torch.no_grad():
        patches = network.vision_backbone(torch.zeros(1, 1, 3, size, size, dtype=torch.uint8))
    if not bool(patches.isfinite().all()):
        raise ArithmeticError("its patches are not finite")
    weight = network.language_model.lm_head.weight
    require_bidirectional(network.hidden_states, weight.shape[1], weight)


def vllm_that_fits(machine: Machine) -> Iterable[CheckResult]:
    """Check that an installed vLLM is the pinned one, and that its library loads beside this torch."""
    from vla_rl.engines.vllm.adapter import installed_build, require_vllm

    found = find_spec("vllm")
    if found is None or found.origin is None:
        return
    remedy = f"Run `{shlex.join(install_command('vllm'))}`, or remove vLLM if you do not use it"
    try:
        if installed_build() is not None:
            require_vllm()
    except ConfigError as error:
        yield CheckResult(str(error).rstrip("."), "--engine vllm refuses to start", remedy)
    probed = run_probe(["-c", LIBRARY_PROBE, str(Path(found.origin).parent)], machine.seconds)
    if probed.lacks_instructions:
        yield CheckResult(
            f"vLLM's compiled library cannot run on this CPU ({probed.output})",
            "--engine vllm cannot start: this build of vLLM needs a CPU with AVX2 or AVX-512",
            "Use --engine torch, or another machine; in a virtual machine, pass the host's CPU on",
        )
    elif not probed.worked and not probed.is_late:
        yield CheckResult(
            f"vLLM's compiled library cannot be loaded beside torch {version('torch')} "
            f"({probed.output})",
            "--engine vllm cannot start: the build belongs to another torch",
            remedy,
        )


def load_vllm_library(vllm: str) -> None:
    """Load the compiled library that vLLM would load on this CPU, from the folder of its package.

    A build for CPUs brings one for each set of instructions, as vllm.platforms.cpu imports them;
    loading another one than its own ends the process by SIGILL.
    """
    import torch

    library = choose_library(
        {path.name.partition(".")[0]: path for path in sorted(Path(vllm).glob("_C*.so"))},
        has_avx512=torch.cpu._is_avx512_supported(),
        has_bf16=torch.cpu._is_avx512_bf16_supported(),
    )
    if library is not None:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]


def choose_library(
    libraries: Mapping[str, Path], *, has_avx512: bool, has_bf16: bool
) -> Path | None:
    """Choose among vLLM's libraries by name as vLLM does; None if there is none."""
    name = "_C" if has_avx512 and has_bf16 else "_C_AVX512" if has_avx512 else "_C_AVX2"
    # builds for GPUs and for other processors have `_C` alone
    return libraries.get(name, libraries.get("_C"))


SHIPPED: Final = Path(vla_rl.__file__).parent / "assets"
MANIFEST: Final = "manifest.json"
PHYSICS_PROBE: Final = "from vla_rl.envs.libero.probe import probe_physics; probe_physics()"


def bowl_that_settles(machine: Machine) -> Iterable[CheckResult]:
    """Check that the bowl of libero_spatial task 5 comes to rest as in published results."""
    if find_spec("libero") is None:
        yield CheckResult(
            "LIBERO is not installed",
            "Its recipes cannot start",
            "Run `vla-rl install libero`, if you need them",
            "warning",
        )
        return
    settled = run_probe(["-c", PHYSICS_PROBE], machine.seconds)
    if settled.is_late:
        yield not_finished("the fall of LIBERO's bowl", machine.seconds)
    elif settled.output.startswith("FileNotFoundError: "):
        lacking = settled.output.removeprefix("FileNotFoundError: ").rstrip(".")
        yield CheckResult(lacking, "LIBERO's tasks cannot start", "See the error's remedy")
    elif not settled.worked:
        yield CheckResult(
            f"LIBERO's physics is not that of published results ({settled.output})",
            "Success rates would be some points off, without an error",
            'Run `pip install "mujoco>=3.3.0,<3.3.3"`, and use LIBERO\'s own assets',
        )


def assets_with_digests(machine: Machine) -> Iterable[CheckResult]:
    """Check the digests of shipped policies, of LIBERO's asset packages, and the chosen folder."""
    for folder in sorted(path.parent for path in SHIPPED.glob(f"*/{MANIFEST}")):
        yield from _check_folder(folder)
    for wheel in WHEELS:
        name = damaged_in_wheel(wheel)
        if name is not None:
            yield CheckResult(
                f"{name} of the package {wheel} is damaged or missing",
                "LIBERO's tasks that show it look different, or cannot start",
                f"Run `{wheel_install_command([wheel], again=True)}`",
            )
    if find_spec("libero") is None:
        return
    from vla_rl.envs.libero.assets import PLACEHOLDER_ASSETS, find_assets

    os.environ["VLA_RL_ASSETS_ANNOUNCED"] = "1"  # said below, as a result
    try:
        found = find_assets()
    except FileNotFoundError as error:
        yield CheckResult(str(error).rstrip("."), "LIBERO cannot start", "See the error's remedy")
    else:
        if found.source == PLACEHOLDER_ASSETS:
            yield CheckResult(
                "LIBERO's own meshes and textures are not installed; placeholder assets take their place",
                "Results are not comparable with published ones",
                "Run `vla-rl install assets`, unless you use the policy that ships",
                "warning",
            )


def _check_folder(folder: Path) -> Iterable[CheckResult]:
    from vla_rl.util.atomic_files import verify_folder

    try:
        verify_folder(folder)
    except CheckpointError as error:
        yield CheckResult(
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
        # the record itself and compiled modules have no digest
        if file.hash is None:
            continue
        # the size first: it costs nothing, and the packages hold 357 MB to hash
        if not path.is_file() or (file.size is not None and path.stat().st_size != file.size):
            return str(file)
        with path.open("rb") as content:
            found = hashlib.file_digest(content, file.hash.mode).digest()
        if base64.urlsafe_b64encode(found).rstrip(b"=").decode() != file.hash.value:
            return str(file)
    return None
