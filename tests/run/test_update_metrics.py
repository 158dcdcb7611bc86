"""The metrics of one update come from its nodes, its learner and the run's parts."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
import torch
from msgspec.structs import replace
from toy_runs import small_run

from vla_rl.engines import DeviceLane
from vla_rl.graph import Update
from vla_rl.graph.spans import CriticalPath
from vla_rl.learner import UpdateReport
from vla_rl.recipes.srpo_toy import SrpoToyConfig
from vla_rl.run.update_metrics import UpdateMetrics


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
