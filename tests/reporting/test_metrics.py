"""Metrics reach every sink, survive a crash, and never stop the run."""

import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from disks import SmallDisk

from vla_rl.errors import ConfigError
from vla_rl.reporting import (
    JsonlSink,
    MetricLog,
    RunDirectory,
    TensorBoardSink,
    WandbSink,
    read_metrics,
)
from vla_rl.types import Config


class ExampleConfig(Config, frozen=True):
    updates: int = 2


class ListSink:
    """Keeps what it is given; fails from `fails_at` on."""

    def __init__(self, fails_at: int | None = None, fails_to_close: bool = False) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.calls = 0
        self.closed = False
        self._fails_at, self._fails_to_close = fails_at, fails_to_close

    def write_metrics(self, update: int, wall_time_s: float, values: Mapping[str, float]) -> None:
        self.calls += 1
        if self._fails_at is not None and update >= self._fails_at:
            raise OSError(28, "No space left on device")
        self.lines.append((update, dict(values)))

    def write_late(
        self, update: int, wall_time_s: float, values: Mapping[str, float], now: int
    ) -> None:
        self.lines.append((update, {**values, "now": now}))

    def close(self) -> None:
        if self._fails_to_close:
            raise ConnectionError("gone")
        self.closed = True


def tensorboard_scalars(run: RunDirectory) -> dict[tuple[int, str], float]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (events,) = run.tensorboard.iterdir()
    return {
        (event.step, value.tag): value.tensor.float_val[0]
        for event in EventFileLoader(str(events)).Load()
        for value in event.summary.value
    }


def test_a_run_writes_json_lines_and_tensorboard(tmp_path) -> None:
    run = RunDirectory.create(tmp_path, "srpo", ExampleConfig())
    with MetricLog.open_log(run) as log:
        log.write(1, {"train/loss": 0.5, "rollout/success_rate": np.float32(0.25)})
        log.write(2, {"train/loss": 0.25, "rollout/success_rate": 1})
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [
        (line["update"], line["train/loss"], line["rollout/success_rate"]) for line in lines
    ] == [
        (1, 0.5, 0.25),
        (2, 0.25, 1.0),
    ]
    assert tensorboard_scalars(run) == {
        (1, "train/loss"): 0.5,
        (1, "rollout/success_rate"): 0.25,
        (2, "train/loss"): 0.25,
        (2, "rollout/success_rate"): 1.0,
    }


def test_a_failing_sink_is_reported_once_tried_again_and_the_others_go_on(caplog) -> None:
    broken, working = ListSink(fails_at=2), ListSink()
    with caplog.at_level(logging.WARNING):
        log = MetricLog([broken, working])
        for update in range(1, 5):
            log.write(update, {"train/loss": 0.0})
        (record,) = [record for record in caplog.records if record.name.startswith("vla_rl")]
        log.close()
    assert [update for update, _ in working.lines] == [1, 2, 3, 4]
    # once for update 1, then update 2 again with each that follows and at the end
    assert broken.calls == 5
    assert "ListSink failed at update 2" in record.getMessage()
    assert "No space left" in record.getMessage()
    assert "ListSink: 3 records were never written, the first of them update 2" in caplog.text


def test_a_sink_that_fails_to_close_does_not_keep_others_open(caplog) -> None:
    sinks = [ListSink(), ListSink(fails_to_close=True), ListSink()]
    with caplog.at_level(logging.WARNING):
        MetricLog(sinks).close()
    assert [sink.closed for sink in sinks] == [True, False, True]
    assert "failed to close" in caplog.text


@pytest.mark.parametrize("key", ["loss", "/loss", "train/", "train//loss"])
def test_a_key_without_a_namespace_is_refused_and_the_update_has_its_line(key) -> None:
    kept = ListSink()
    with pytest.raises(ConfigError, match="metric key is"):
        MetricLog([kept]).write(1, {key: 0.0, "train/grad_norm": 1.0})
    assert kept.lines == [(1, {"train/grad_norm": 1.0})]


@pytest.mark.parametrize(
    "key", ["Alice/update/loss", "agent-1/update/loss", "time/node/my node_s", "success_rate/a b"]
)
def test_agents_nodes_and_tasks_may_be_called_as_one_likes(key, tmp_path) -> None:
    run = RunDirectory.create(tmp_path, "names", Config())
    with MetricLog.open_log(run) as log:
        log.write(1, {key: 0.5})
    assert read_metrics(run.metrics)[0][key] == 0.5


def test_lines_survive_a_process_that_dies_at_once(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    program = (
        "import os, sys, pathlib; from vla_rl.reporting import JsonlSink;"
        "sink = JsonlSink(pathlib.Path(sys.argv[1]));"
        "[sink.write_metrics(u, 0.0, {'train/loss': u}) for u in (1, 2, 3)];"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], timeout=60, check=False)
    assert done.returncode == -9
    assert [line["train/loss"] for line in read_metrics(path)] == [1.0, 2.0, 3.0]


def test_half_a_line_is_left_out_and_the_next_run_begins_a_new_one(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"update":1,"train/loss":1.0}\n{"update":2,"tra')
    sink = JsonlSink(path)
    sink.write_metrics(2, 0.0, {"train/loss": 2.0})
    sink.close()
    assert [(line["update"], line["train/loss"]) for line in read_metrics(path)] == [
        (1, 1.0),
        (2, 2.0),
    ]


def test_an_update_done_again_after_a_resume_counts_once_and_last(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for update, loss in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0)):
        sink.write_metrics(update, 0.0, {"train/loss": loss})
    sink.close()
    assert [line["train/loss"] for line in read_metrics(path)] == [1.0, 20.0, 3.0]


def test_a_value_that_is_not_finite_is_null_in_the_file(tmp_path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write_metrics(1, 0.0, {"train/loss": float("nan"), "train/grad_norm": float("inf")})
    sink.close()
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (line["train/loss"], line["train/grad_norm"]) == (None, None)


@pytest.mark.parametrize("room", [0, 1, 80, 150])
def test_a_full_disk_delays_lines_and_leaves_each_update_exactly_one(
    room, tmp_path, monkeypatch, caplog
) -> None:
    run, disk = RunDirectory.create(tmp_path, "full", Config()), SmallDisk(monkeypatch)
    with caplog.at_level(logging.WARNING), MetricLog.open_log(run) as log:
        for update in range(1, 9):
            disk.room = room if update == 3 else None if update == 7 else disk.room
            log.write(update, {"train/loss": update / 2})
            lines = run.metrics.read_bytes().splitlines(keepends=True)
            # no half line at any time
            assert all(line.endswith(b"\n") and json.loads(line) for line in lines)
    assert [json.loads(line)["update"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert tensorboard_scalars(run) == {
        (update, "train/loss"): update / 2 for update in range(1, 9)
    }
    reports = [record.getMessage() for record in caplog.records]
    assert sum("metrics.jsonl" in text for text in reports) == 1
    assert sum("tfevents" in text for text in reports) == 1
    assert all("[Errno 28]" in text or "works again" in text for text in reports)


def test_lines_that_found_no_place_are_given_to_the_checkpoint_and_written_after_a_resume(
    tmp_path, monkeypatch
) -> None:
    run, disk = (
        RunDirectory.create(tmp_path, "full", Config()),
        SmallDisk(monkeypatch, of="metrics.jsonl"),
    )
    log = MetricLog.open_log(run)
    log.write(1, {"train/loss": 1.0})
    assert log.secured() == b""
    disk.room = 0
    log.write(2, {"train/loss": 2.0})
    log.write(3, {"train/loss": float("nan")})
    kept = log.secured()
    assert [json.loads(line)["update"] for line in kept.splitlines()] == [2, 3]
    disk.room = None  # the process is killed, and the run resumed from a checkpoint of update 3
    with MetricLog.open_log(run, resumed_at=3) as resumed:
        resumed.add_missing(kept, run.metrics)
        resumed.add_missing(kept, run.metrics)
    assert [(line["update"], line["train/loss"]) for line in read_metrics(run.metrics)] == [
        (1, 1.0),
        (2, 2.0),
        (3, None),
    ]
    assert len(run.metrics.read_bytes().splitlines()) == 3


def test_a_resumed_run_sets_the_lines_aside_that_it_makes_anew(tmp_path) -> None:
    run = RunDirectory.create(tmp_path, "back", Config())
    with MetricLog.open_log(run) as log:
        for update in range(1, 6):
            log.write(update, {"train/loss": 0.0})
    with run.metrics.open("ab") as file:
        file.write(b'{"update":6,"tra')  # killed here
    for _ in range(2):
        with MetricLog.open_log(run, resumed_at=3) as log:
            log.write(4, {"train/loss": 4.0})
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [(line["update"], line["train/loss"]) for line in lines] == [
        (1, 0.0),
        (2, 0.0),
        (3, 0.0),
        (4, 4.0),
    ]
    undone = (run.path / "metrics-undone.jsonl").read_text().splitlines()
    assert [line[:12] for line in undone] == [
        '{"update":4,',
        '{"update":5,',
        '{"update":6,',
        '{"update":4,',
    ]
    # TensorBoard hides what earlier files show of updates from 4 on
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(run.tensorboard))
    shown.Reload()
    assert [event.step for event in shown.Scalars("train/loss")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "damaged",
    [
        b'{"update":2,"train/loss":"\xff"}',
        b'{"update":2,"train/loss":',
        b'{"train/loss":2.0}',
        b'{"update":"2"}',
        b'{"update":2,"train/loss":"high"}',
        b"[2]",
        b"[" * 5000,
        b"",
    ],
)
def test_a_damaged_line_is_left_out_and_counted(damaged, tmp_path, caplog) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"update":1,"train/loss":1.0}\n' + damaged + b'\n{"update":3,"train/loss":null}\n'
    )
    with caplog.at_level(logging.WARNING):
        assert [line["update"] for line in read_metrics(path)] == [1, 3]
    assert f"{path}: 1 lines are not the metrics of an update" in caplog.text


def test_tensorboard_comes_without_torch_and_tensorflow(tmp_path) -> None:
    program = (
        "import sys, pathlib; from vla_rl.reporting import TensorBoardSink;"
        "sink = TensorBoardSink(pathlib.Path(sys.argv[1])); sink.write_metrics(1, 0.0, {'train/loss': "
        "1.0}); sink.close();"
        "print(sorted({'torch', 'tensorflow'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_tensorboard_sink_without_events_closes_and_leaves_no_file(tmp_path) -> None:
    TensorBoardSink(tmp_path / "new").close()
    assert list(tmp_path.iterdir()) == []


def test_what_was_measured_late_is_drawn_at_its_own_update_and_adds_no_line(
    tmp_path: Path,
) -> None:
    run, kept = RunDirectory.create(tmp_path, "late", ExampleConfig()), ListSink()
    with MetricLog([kept, TensorBoardSink(run.tensorboard)], JsonlSink(run.metrics)) as log:
        for update in (1, 2, 3):
            log.write(update, {"train/loss": 0.5})
        log.write_late(1, {"held_out/success_rate": 0.25})
    assert kept.lines[-1] == (1, {"held_out/success_rate": 0.25, "now": 3})
    assert tensorboard_scalars(run)[1, "held_out/success_rate"] == 0.25
    assert [line["update"] for line in read_metrics(run.metrics)] == [1, 2, 3]
    assert "held_out" not in run.metrics.read_text()


def test_weights_and_biases_gets_what_came_late_at_its_newest_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[tuple[dict[str, float], int]] = []
    axes: list[tuple[str, str]] = []
    online = SimpleNamespace(
        log=lambda values, step: logged.append((values, step)),
        define_metric=lambda name, step_metric: axes.append((name, step_metric)),
        finish=lambda: None,
    )
    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(init=lambda project, name, config: online)
    )
    sink = WandbSink("robots", "srpo-1", {})
    sink.write_late(4, 0.0, {"held_out/success_rate": 0.5}, now=9)
    sink.write_late(8, 0.0, {"held_out/success_rate": 0.75}, now=9)
    # a step before the newest one would be dropped
    assert logged == [
        ({"held_out/success_rate": 0.5, "held_out/weights": 4}, 9),
        ({"held_out/success_rate": 0.75, "held_out/weights": 8}, 9),
    ]
    assert axes == [
        ("held_out/*", "held_out/weights"),
        ("held_out_choose/*", "held_out/weights"),
    ]


def test_asking_for_wandb_without_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"install vla_rl\[wandb\]"):
        WandbSink("robots", "srpo-1", {})
