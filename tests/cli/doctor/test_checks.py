"""`vla-rl doctor` makes every check; limits that are too low, GPUs that cannot be used are named."""

import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from toy_runs import small_run

from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.doctor import CHECKS, CheckResult, Machine, check_at_start, machine, run_checks
from vla_rl.cli.doctor.libraries import run_probe
from vla_rl.cli.doctor.policy import checkpoint_that_acts, entropy_share
from vla_rl.cli.launch import launch
from vla_rl.cli.memory_plan import EpisodeFootprint
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.models.prismatic.config import tiny
from vla_rl.models.shipped import BASE_POLICY
from vla_rl.recipes.srpo_toy import new_policy, training_starts

MACHINE = Machine(seconds=150.0)  # a busy machine takes its time; nothing waits for it
PROGRAM = [sys.executable, "-m", "vla_rl.cli.main", "doctor"]


def words(results: Iterable[CheckResult]) -> str:
    return "\n".join(str(result) for result in results)


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
    monkeypatch.setattr("vla_rl.run.train.train", stop)
    config = small_run(tmp_path)
    footprint = EpisodeFootprint(
        what_runs="toy", simulator_mb=1, server_mb=1, chunk_bytes=1, num_chunks=1
    )
    with pytest.raises(Stopped):
        await launch(
            Command(TrainingLaunch(), config),
            training_starts(config),
            new_policy(config),
            footprint,
        )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: GPU 0 (NVIDIA H100 80GB HBM3) has 40.6 of 79.6 GiB in use")


def test_a_check_that_fails_or_hangs_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(machine: Machine) -> Iterable[CheckResult]:
        raise OSError("no such thing")

    def endless(machine: Machine) -> Iterable[CheckResult]:
        run_probe(["-c", "import time; time.sleep(600)"], 600.0)
        return ()

    checks = {"broken": broken, "endless": endless, "fine": lambda machine: ()}
    monkeypatch.setattr("vla_rl.cli.doctor.checks.CHECKS", checks)
    found = run_checks(Machine(seconds=1.0))
    assert "broken failed (OSError: no such thing)" in words(found["broken"])
    assert "was not finished within 1 s" in words(found["endless"])
    assert not found["fine"]


def test_the_program_prints_each_check_and_its_results_and_ends_with_their_status(
    tmp_path: Path,
) -> None:
    soonest = ["descriptors", "shared memory", "disk"]
    code = (
        "import sys; from vla_rl.cli.doctor.checks import main; from vla_rl.cli.doctor import checks\n"
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


def test_a_head_that_was_never_trained_for_tokens_is_named(tmp_path: Path) -> None:
    untrained = OpenVlaOft.create(tiny(), seed=0)
    untrained.save(tmp_path / "new")
    found = words(checkpoint_that_acts(Machine(checkpoint=str(tmp_path / "new"))))
    assert "almost at random" in found
    assert "token RL on it scores 0 %" in found


def test_the_shipped_policy_is_in_order() -> None:
    assert not words(checkpoint_that_acts(Machine(checkpoint=str(BASE_POLICY))))
    assert entropy_share(OpenVlaOft.load(BASE_POLICY)) < 0.7


def test_a_folder_trained_for_numbers_that_is_read_as_tokens_is_named(policy_copy: Path) -> None:
    (policy_copy / "action_head--50000_checkpoint.pt").write_bytes(b"weights of an L1 head")
    machine = Machine(checkpoint=str(policy_copy), policy_family="openvla_oft")
    found = words(checkpoint_that_acts(machine))
    assert "action_head--50000_checkpoint.pt lies beside it" in found
    assert "--policy-family continuous" in found


def test_statistics_of_another_robot_are_named(policy_copy: Path) -> None:
    config = msgspec.json.decode((policy_copy / "config.json").read_bytes())
    action = config["norm_stats"]["default"]["action"]
    for end in ("q01", "q99"):
        action[end] = (np.array(action[end]) * 0.03).tolist()
    (policy_copy / "config.json").write_bytes(msgspec.json.encode(config))
    found = words(checkpoint_that_acts(Machine(checkpoint=str(policy_copy))))
    assert "scale displacements to at most 0.030" in found


def test_statistics_that_are_asked_for_and_missing_are_named(policy_copy: Path) -> None:
    machine = Machine(checkpoint=str(policy_copy), norm_key="libero_goal")
    found = words(checkpoint_that_acts(machine))
    assert "no 'libero_goal'" in found
    assert "--norm-key" in found


def test_too_few_descriptors_are_named() -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

    code = (
        "from vla_rl.cli.doctor import Machine, machine; "
        "print(*machine.descriptors(Machine(num_envs=64)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, preexec_fn=lower
    )
    assert "may open 128 files, and 64 simulators need 7" in done.stdout, done.stderr
    assert "ulimit -n" in done.stdout


def test_a_small_folder_in_memory_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; from vla_rl.cli.doctor import Machine, machine; "
        "print(*machine.shared_memory(Machine(shared_memory=sys.argv[1])))"
    )
    mounted = f'mount -t tmpfs -o size=1m tmpfs {shlex.quote(str(tmp_path))} && exec "$0" "$@"'
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
    checked = Machine(root=str(tmp_path / "runs"), checkpoint_bytes=free, keep_checkpoints=3)
    found = words(machine.disk(checked))
    assert "and 3 checkpoints" in found
    assert found in words(check_at_start(checked))
    assert not words(machine.disk(Machine(root=str(tmp_path), checkpoint_bytes=1)))


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a build of torch without CUDA")
def test_a_cpu_build_of_torch_on_a_machine_with_gpus_is_named(
    smi: Callable[[str, int], None],
) -> None:
    smi("NVIDIA H100 80GB HBM3, 81559, 81000", 0)
    assert "is a build without CUDA, and this machine has 1 GPU" in words(machine.gpus(MACHINE))


def test_a_gpu_that_others_use_is_named_also_at_a_recipes_start(
    smi: Callable[[str, int], None],
) -> None:
    smi("NVIDIA H100 80GB HBM3, 81559, 40000", 0)
    assert "GiB in use by other programs" in words(machine.gpus(MACHINE))
    assert "GPU 0 (NVIDIA H100 80GB HBM3)" in words(check_at_start(MACHINE))


def test_a_driver_that_does_not_answer_is_named(smi: Callable[[str, int], None]) -> None:
    smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9)
    assert "couldn't communicate with the NVIDIA driver" in words(machine.gpus(MACHINE))


def test_a_driver_too_old_for_torch_is_named(
    smi: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    smi("NVIDIA A100-SXM4-80GB, 81920, 81900", 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", refuse)
    found = words(machine.gpus(MACHINE))
    assert "driver on your system is too old" in found
    assert "built for an older CUDA" in found
