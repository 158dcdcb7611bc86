"""What a run takes of its machine: simulators, text environments, the device that it computes on, memory.

The estimate that a dry run prints, and the versions that a run records.
"""

import importlib.metadata
import io
import os
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.envs.text import TextEnvPool, TextPoolConfig
from vla_rl.errors import ConfigError
from vla_rl.pipelines.config import (
    LearningConfig,
    MixedTrainingConfig,
    RunConfig,
    TextTrainingConfig,
    TrainingConfig,
)
from vla_rl.reporting import (
    GpuMemory,
    MemoryItem,
    available_bytes,
    gpu_memory,
    memory_table,
    resident_bytes,
)
from vla_rl.reporting.machine import git_commit, parse_gpu_memory, versions
from vla_rl.rollout import TaskStart
from vla_rl.team.devices import resolve_device, why_no_gpu
from vla_rl.team.pools import (
    MixedPool,
    describe_environments,
    make_pool,
    simulator_pids,
    start_kinds,
)
from vla_rl.types import EnvSpec

GIB = 2**30

ROBOT = TaskStart(env=EnvSpec(id="vla_rl/toy_reach-v0"), task="reach")
TWO, CONVERSATIONS = SimulatorConfig(num_envs=2), TextPoolConfig(num_envs=3)
TEXT = TaskStart(env=EnvSpec(id="text/arithmetic"), task="sums")


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


@pytest.mark.parametrize(
    ("config", "starts", "kind", "words"),
    [
        (TrainingConfig(simulators=TWO), [ROBOT], SimulatorPool, "simulators"),
        (TextTrainingConfig(text=CONVERSATIONS), [TEXT], TextEnvPool, "text environments"),
        (
            MixedTrainingConfig(simulators=TWO, text=CONVERSATIONS),
            [ROBOT, TEXT],
            MixedPool,
            "simulators and text environments",
        ),
    ],
)
def test_a_configuration_chooses_its_environments(
    config: LearningConfig, starts: list[TaskStart], kind: type, words: str
) -> None:
    pool = make_pool(config, Runtime("pools"), starts)
    assert type(pool) is kind
    assert pool.num_envs == config.num_envs
    assert describe_environments(config) == words
    assert simulator_pids(pool) == []


def test_starts_are_of_the_kind_of_their_environment() -> None:
    assert start_kinds([ROBOT, TEXT]) == ["simulator", "text"]


class Nowhere(LearningConfig, frozen=True, kw_only=True):
    """A configuration without environments."""

    @property
    def num_envs(self) -> int:
        return 1


def test_a_configuration_without_environments_is_refused() -> None:
    with pytest.raises(ConfigError, match="a Nowhere has no settings for environments; use"):
        make_pool(Nowhere(), Runtime("pools"), [ROBOT])


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)


def test_a_run_on_the_cpu_does_not_ask_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device(RunConfig(device="cpu")).type == "cpu"
    assert resolve_device(RunConfig(device="auto")).type == "cuda"
    assert why_no_gpu() is None


def test_a_run_on_any_device_says_why_it_takes_the_cpu(
    without_gpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resolve_device(RunConfig(device="auto")).type == "cpu"
    assert "is a build without CUDA): the policy and the learner compute on the CPU" in (
        capsys.readouterr().out
    )


def test_a_gpu_that_was_asked_for_and_is_not_there_is_refused(without_gpu: None) -> None:
    with pytest.raises(ConfigError, match=r"device is 'cuda', but torch sees no GPU \(torch .*\)"):
        resolve_device(RunConfig(device="cuda"))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("The driver is too old.\nUpdate it."), "The driver is too old"),
        (None, "CUDA lists none"),
    ],
)
def test_the_reason_is_the_first_line_of_the_drivers(
    error: Exception | None, reason: str, without_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    assert why_no_gpu() == reason
