"""Limits that are too low and GPUs that cannot be used are named: each test makes one fault happen."""

import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from faults import MACHINE, words

from vla_rl.cli.doctor import Machine, check_at_start, machine


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
