"""Metrics of an update, the use of the device, and the estimates of both before a run."""

import json
import re
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
import pytest_asyncio
import torch
from msgspec.structs import replace
from rich.console import Console
from toy_runs import small_run

from vla_rl.cli.dry_run import print_plan
from vla_rl.cli.memory_plan import EpisodeFootprint
from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.errors import ConfigError
from vla_rl.graph import Update
from vla_rl.graph.update import CriticalPath
from vla_rl.learner import LearnerConfig, UpdateReport
from vla_rl.learner.flops import TERA, DevicePeak
from vla_rl.models.example_inputs import ConversationSizes
from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny
from vla_rl.pipelines.config import RunConfig, TextTrainingConfig
from vla_rl.recipes.srpo_toy import SrpoToyConfig
from vla_rl.recipes.train_toy import TrainToyConfig, new_policy, training_starts
from vla_rl.rollout import ChatLimits, SchedulerConfig
from vla_rl.run.estimates import (
    RunEstimate,
    concerns_gpus,
    estimate_run,
    peak_of_run,
    require_gpu_memory,
    require_room,
    seconds_of_update,
)
from vla_rl.run.train import train
from vla_rl.run.update_metrics import UpdateMetrics
from vla_rl.team.devices import resolve_device
from vla_rl.team.members import Member, Team


class Learner:
    """Notes the peak that it counts with."""

    def __init__(self) -> None:
        self.peak_flops = 0.0

    def count_flops(self, peak_flops: float) -> None:
        self.peak_flops = peak_flops


class FakeParts:
    """A lane, and the little of a run's other parts that is read."""

    def __init__(self, lane: DeviceLane) -> None:
        self.lane, self.device, self.learner = lane, torch.device("cpu"), Learner()
        self.learn = SimpleNamespace(last_report=None)
        self.runtime = self

    def metrics(self) -> dict[str, float]:
        return {"engine/batch_size": 4.0, "shared": 2.0}

    async def loop_lag(self) -> Any:
        return SimpleNamespace(p99_s=0.01, max_s=0.02)

    def report(self, version: int) -> None:
        metrics = {"learner/loss": 0.5, "shared": 1.0}
        self.learn.last_report = UpdateReport(weight_version=version, metrics=metrics)


@pytest_asyncio.fixture
async def parts() -> AsyncIterator[Any]:
    async with DeviceLane(1) as lane:
        yield FakeParts(lane)


@pytest.fixture
def config(tmp_path: Any) -> SrpoToyConfig:
    return small_run(tmp_path)


def update(index: int) -> Update:
    return Update(
        index=index,
        values={},
        metrics={"reward/mean": 0.25},
        spans={},
        started=1.0,
        ended=3.5,
        critical_path=CriticalPath(index, 2.5, ()),
    )


async def test_an_update_has_the_metrics_of_its_nodes_its_learner_and_the_parts(
    parts: Any, config: SrpoToyConfig
) -> None:
    parts.report(3)
    metrics = await UpdateMetrics(config, parts, 0).measure(update(2))
    assert metrics == {
        "learner/loss": 0.5,
        "reward/mean": 0.25,
        "engine/batch_size": 4.0,
        "shared": 2.0,
        "time/update_s": 2.5,
        "time/device_busy_share": metrics["time/device_busy_share"],
        "time/loop_lag_p99_s": 0.01,
        "time/loop_lag_max_s": 0.02,
    }


async def test_an_update_that_was_cut_short_before_its_learner_has_no_report(
    parts: Any, config: SrpoToyConfig
) -> None:
    measured = UpdateMetrics(config, parts, 0)
    assert measured.report_of(update(0)) is None
    parts.report(3)
    assert measured.report_of(update(3)) is None  # the report of the update before
    assert "learner/loss" not in await measured.measure(update(3))


@pytest.mark.parametrize(
    ("ranks", "restarts", "shown"), [(1, 0, None), (1, 2, 2.0), (2, 0, 0.0), (2, 1, 1.0)]
)
async def test_restarts_are_shown_where_there_are_or_may_be_some(
    parts: Any, config: SrpoToyConfig, ranks: int, restarts: int, shown: float | None
) -> None:
    shared = replace(config, learner=replace(config.learner, ranks=ranks))
    metrics = await UpdateMetrics(shared, parts, restarts).measure(update(0))
    assert metrics.get("learner/restarts") == shown


@pytest.mark.parametrize(("ranks", "is_lanes"), [(1, True), (2, False)])
async def test_arithmetic_is_counted_where_it_is_done(
    parts: Any, config: SrpoToyConfig, ranks: int, is_lanes: bool
) -> None:
    run = replace(config.run, peak_tflops=2.0)
    learner = replace(config.learner, ranks=ranks)
    metrics = await UpdateMetrics(replace(config, run=run, learner=learner), parts, 0).measure(
        update(0)
    )
    assert ("device/mfu" in metrics) == is_lanes
    assert parts.learner.peak_flops == (0.0 if is_lanes else 2e12)


FOOTPRINT = EpisodeFootprint(
    what_runs="toy", simulator_mb=15, server_mb=60, chunk_bytes=100, num_chunks=20, decision_s=1e-3
)


def with_run(root: Path, **fields: Any) -> TrainToyConfig:
    """A small run of an MLP: a trace of its passes, or a profile of them, is there soon."""
    return TrainToyConfig(
        run=RunConfig(root=str(root), **fields),
        group_size=2,
        step_limit=40,
        simulators=SimulatorConfig(num_envs=2),
        scheduler=SchedulerConfig(groups_per_update=2, max_staleness=0),
        learner=LearnerConfig(),
    )


class Planned(NamedTuple):
    """A run on a CPU that begins nothing, and what is expected of it."""

    config: TrainToyConfig
    team: Team
    estimate: RunEstimate


@pytest.fixture(scope="module")
def planned() -> Planned:
    config = with_run(Path("runs"), device="cpu")
    team = Team.of(new_policy(config))
    estimate = estimate_run(config, team)
    assert estimate is not None
    return Planned(config, team, estimate)


@pytest.fixture
def free_and_total(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of a GPU that has 16 GiB, all of them free."""
    memory = [2**34, 2**34]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: tuple(memory))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    return memory


async def test_a_run_with_a_known_peak_is_profiled_and_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_run(tmp_path, updates=4, peak_tflops=1e-6, profile_updates="1-2")
    run = (await train(config, training_starts(config), new_policy(config))).run
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line in lines:
        assert 0.0 < line["device/mfu"] < line["device/mfu_update"]
        assert line["device/tflops_per_s"] == pytest.approx(line["device/mfu"] * 1e-6)
    # a rollout may be over before the line of the update before it is written: then one line has both
    acted = [line["device/mfu_act"] for line in lines if "device/mfu_act" in line]
    assert acted
    assert min(acted) > 0.0

    spans = [each for each in json.loads(run.trace(0).read_text()) if each["ph"] == "X"]
    shown = {each["name"]: each["args"].get("mfu") for each in spans}
    assert shown["update 0"] == pytest.approx(lines[0]["device/mfu_update"], abs=1e-4)
    assert shown["rollout 1"] == pytest.approx(lines[1].get("device/mfu_act"), abs=1e-4)
    assert shown["advantage 0"] is None

    path = run.path / "profile-000001-000002.json"
    assert f"profile of updates 1 to 2: {path}" in capsys.readouterr().out
    events = json.loads(path.read_text())["traceEvents"]
    named = [each for each in events if each.get("cat") == "user_annotation"]
    names = {each["name"] for each in named}
    assert {"act", "update[0]: update", "update[1]: update"} <= names
    assert "update[3]: update" not in names
    updates = [each for each in named if each["name"] == "update[1]: update"]
    inside = {
        each["name"]
        for each in events
        for update in updates
        if each.get("cat") == "cpu_op"
        and update["ts"] <= each["ts"] <= update["ts"] + update["dur"]
    }
    assert any(name.startswith("aten::") for name in inside)


async def test_a_run_on_a_device_without_a_known_peak_counts_nothing(tmp_path: Path) -> None:
    config = with_run(tmp_path, updates=1)
    run = (await train(config, training_starts(config), new_policy(config))).run
    assert "device/mfu" not in run.metrics.read_text()
    assert not list(run.path.glob("profile-*"))


@pytest.mark.parametrize("wrong", ["0", "4-3", "3-", "a", "1,2"])
def test_profiled_updates_are_a_number_or_a_range(wrong: str) -> None:
    assert RunConfig(profile_updates="3-4").profiled == range(3, 5)
    with pytest.raises(ConfigError, match=r"profile_updates is .*, expected one number from 1 on"):
        RunConfig(profile_updates=wrong)


def test_an_update_that_does_not_fit_the_gpu_is_refused_with_the_inequality(
    planned: Planned, free_and_total: list[int]
) -> None:
    config, team, estimate = planned
    gpu = torch.device("cuda")
    require_room(estimate.certain, gpu)
    free_and_total[:] = 2**20, 2**34
    with pytest.raises(ConfigError, match=r"> 0\.8 GiB; other programs use 15\.2 of its 16\.0 GiB"):
        require_room(estimate.certain, gpu)
    require_gpu_memory(config, team, torch.device("cpu"))
    free_and_total[:] = 2**28, 2**28
    with pytest.raises(
        ConfigError, match=r"more memory than the GPU has free: .* > 0\.2 GiB; take a"
    ):
        require_gpu_memory(config, team, torch.device("cuda"))


def test_the_reason_why_there_is_no_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"no GPU \(torch .* is a build without CUDA\); expected"):
        resolve_device(RunConfig(device="cuda"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", refuse)
    assert resolve_device(RunConfig(device="auto")) == torch.device("cpu")
    assert "driver on your system is too old" in capsys.readouterr().out


def test_copies_of_weights_count(planned: Planned) -> None:
    config, team, once = planned
    several = msgspec.structs.replace(
        config, learner=msgspec.structs.replace(config.learner, minibatch_trajectories=1)
    )
    twice = estimate_run(several, team)
    assert twice is not None
    assert twice.memory.tensors - once.memory.tensors == once.size.weight_bytes
    assert "weights that act" in twice.memory.terms
    models = {name: Member(new_policy(config)) for name in ("one", "two")}
    assert estimate_run(config, Team(models)) is None


def talking(root: Path, **fields: Any) -> TextTrainingConfig:
    toy = small_run(root)
    return TextTrainingConfig(
        run=toy.run,
        scheduler=toy.scheduler,
        text=TextPoolConfig(num_envs=4),
        engine=EngineConfig(max_batch=4, kept_conversations=2, max_reply=32),
        chat=ChatLimits(max_turns=3, max_reply=16),
        **fields,
    )


@cache
def speaker() -> CausalLanguageModel:
    """A policy of one layer with a context of 256 tokens, in float32."""
    return tiny(TinyConfig(context_size=256, num_layers=1), ["one two"], seed=0)


def test_a_language_policys_update_is_estimated_from_its_longest_conversations(
    tmp_path: Path,
) -> None:
    team = Team.of(speaker())
    learner = LearnerConfig(micro_batch=64, micro_batch_tokens=1000)
    config = talking(tmp_path, learner=learner)
    unknown = estimate_run(config, team)
    assert unknown is not None
    # all of the context, of which three replies of 16 tokens are generated
    assert unknown.conversations == ConversationSizes(
        prompt=1, scored=255, completion_tokens=48, rows=1000 // 256
    )
    known = estimate_run(config, team, observation_tokens=52)
    assert known is not None
    assert known.conversations == ConversationSizes(
        prompt=1, scored=99, completion_tokens=48, rows=10
    )
    shape: Any = speaker().network.config
    each = 2 * shape.num_hidden_layers * shape.hidden_size * 4
    assert known.memory.terms["keys and values"] == (4 + 2) * 100 * each
    assert known.memory.total > known.certain.total
    assert known.traced.act_flops > 100 * 2 * known.size.num_trained * 0.8
    one_turn = msgspec.structs.replace(config, chat=ChatLimits(max_turns=1))
    alone = estimate_run(one_turn, team, observation_tokens=52)
    assert alone is not None
    assert alone.conversations == ConversationSizes(
        prompt=52, scored=32, completion_tokens=32, rows=1000 // 84
    )


def test_conversations_that_may_stay_short_are_not_refused(
    tmp_path: Path, free_and_total: list[int]
) -> None:
    team, config = Team.of(speaker()), talking(tmp_path)
    estimate = estimate_run(config, team)
    assert estimate is not None
    free_and_total[:] = [estimate.certain.total] * 2
    require_gpu_memory(config, team, torch.device("cuda"))
    free_and_total[1] -= 1
    with pytest.raises(ConfigError, match="more memory than the GPU has"):
        require_gpu_memory(config, team, torch.device("cuda"))


def test_generation_reads_the_weights_once_a_token(tmp_path: Path) -> None:
    config = talking(tmp_path)
    estimate = estimate_run(config, Team.of(speaker()))
    assert estimate is not None
    assert estimate.conversations is not None
    peak = DevicePeak(1e18, 1e9)
    least = seconds_of_update(config, estimate, peak, num_chunks=3, decision_s=None)
    episodes = config.scheduler.groups_per_update * config.episodes_per_group
    batches = -(-episodes // (config.num_envs // 2))
    seconds = batches * estimate.conversations.completion_tokens * estimate.size.weight_bytes / 1e9
    assert least.acting_s == pytest.approx(seconds)
    assert least.acting_binds == "memory bandwidth"


def test_what_binds_follows_from_the_device_and_the_simulators(planned: Planned) -> None:
    config, _, estimate = planned

    def binds(flops: float, bytes_per_s: float | None, decision_s: float | None) -> str:
        peak = DevicePeak(flops, bytes_per_s)
        return seconds_of_update(config, estimate, peak, num_chunks=20, decision_s=decision_s).binds

    assert binds(1.0, 1e12, 1e-3) == "compute"
    assert binds(1e15, 1.0, 1e-3) == "memory bandwidth"
    assert binds(1e15, 1e12, 1e-3) == "simulators"
    least = seconds_of_update(config, estimate, DevicePeak(1e9), num_chunks=20, decision_s=None)
    rows = 2 * 2 * 20  # groups, episodes of each, decisions of the longest
    assert least.acting_s == pytest.approx(rows * estimate.traced.act_flops / 1e9)
    assert least.learning_s == pytest.approx(rows * estimate.traced.update_flops / 1e9)
    assert least.seconds == pytest.approx(least.acting_s + least.learning_s)
    assert least.simulators_s is None


def test_a_peak_is_that_of_the_option_before_that_of_the_data_sheet() -> None:
    h100 = "NVIDIA H100 80GB HBM3"
    assert peak_of_run(RunConfig(), None) is None
    assert peak_of_run(RunConfig(), h100) == DevicePeak(989 * TERA, 3.35 * TERA)
    given = peak_of_run(RunConfig(peak_tflops=400.0), h100)
    assert given == DevicePeak(400 * TERA, 3.35 * TERA)
    assert peak_of_run(RunConfig(peak_tflops=2.0), None) == DevicePeak(2 * TERA)


def test_a_small_policy_on_a_machine_without_a_gpu_is_not_estimated(tmp_path: Path) -> None:
    config = with_run(tmp_path, device="cpu")
    team = Team.of(new_policy(config))
    assert not concerns_gpus(config, team)
    assert concerns_gpus(with_run(tmp_path, device="cpu", peak_tflops=1.0), team)


def test_a_dry_run_prints_the_gpus_memory_and_the_least_seconds(planned: Planned) -> None:
    config, team, estimate = planned
    out = Console(record=True, width=200)
    print_plan(config, FOOTPRINT, *team.memory_bytes, console=out, estimate=estimate)
    text = out.export_text()
    assert "GPU memory at the peak of an update, 32 rows at a time" in text
    assert re.search(r"activations, kept +│ +\d+\.\d{3}", text)
    assert "fits a GPU of 40 GB (37.3 GiB)" in text
    assert "Seconds of one update on NVIDIA H100 80GB HBM3, 989 TFLOP/s" in text
    assert re.search(r"simulators +│ +0\.0\d\d", text)
    assert "simulators binds" in text or "simulators bind" in text


def test_without_a_gpu_the_passes_of_an_update_are_in_the_memory_of_the_machine(
    planned: Planned, tmp_path: Path
) -> None:
    config, team, estimate = planned
    terms = estimate.memory.terms
    out = Console(record=True, width=200)
    on_cpu = msgspec.structs.replace(config, run=with_run(tmp_path, device="cpu").run)
    print_plan(on_cpu, FOOTPRINT, *team.memory_bytes, console=out, estimate=estimate)
    found = re.search(r"activations of an update, .+?│ +(\d+\.\d{3})", out.export_text())
    assert found is not None
    passes = terms["activations"] + terms["backward of a block"]
    assert float(found[1]) == pytest.approx(passes / 2**30, abs=1e-3)
