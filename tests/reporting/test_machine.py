"""The memory estimate that a dry run prints, and the versions that a run records."""

import importlib.metadata
import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from vla_rl.reporting import (
    GpuMemory,
    MemoryItem,
    available_bytes,
    gpu_memory,
    memory_table,
    resident_bytes,
)
from vla_rl.reporting.machine import git_commit, parse_gpu_memory, versions

GIB = 2**30


def shown(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_an_estimate_adds_up_and_says_whether_it_fits() -> None:
    items = [MemoryItem("env process", GIB // 2, 8), MemoryItem("policy", 3 * GIB)]
    assert "fits in the 7.00 GiB available" in shown(memory_table("Memory", items, 7 * GIB))
    tight = shown(memory_table("Memory", items, 7 * GIB - 1))
    assert "7.00" in tight
    assert "DOES NOT FIT" in tight


def test_a_child_counts_to_its_parent() -> None:
    program = "block = bytearray(200 * 2**20); print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        alone, together = resident_bytes(child.pid), resident_bytes(os.getpid())
        child.communicate(b"\n", timeout=60)
    assert alone >= 200 * 2**20
    assert together > alone
    assert available_bytes() > 0


def test_nvidia_smi_lines_are_read_and_silent_gpus_left_out() -> None:
    text = "NVIDIA H200, 143771, 143000\nNVIDIA H200 MIG, [N/A], [N/A]\n\n"
    assert parse_gpu_memory(text) == [GpuMemory("NVIDIA H200", 143771 * 2**20, 143000 * 2**20)]


def test_without_nvidia_smi_there_is_no_gpu(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu_memory() == []


def test_a_second_run_of_a_process_does_not_read_150_descriptions_of_packages_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = versions()["packages"]
    monkeypatch.delattr(importlib.metadata, "distributions")
    assert versions()["packages"] == first


def test_the_commit_is_marked_where_files_differ_from_it(tmp_path) -> None:
    assert git_commit(tmp_path) is None

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True
        )

    git("init")
    (tmp_path / "code.py").write_text("one")
    git("add", "code.py")
    git("commit", "-m", "one")
    git("tag", "v1")
    clean = git_commit(tmp_path)
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "code.py").write_text("two")
    assert git_commit(tmp_path) == f"{clean}-dirty"
