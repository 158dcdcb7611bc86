"""Held-out starts are evaluated beside training: in which order, what is kept, and what is left."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from small_worlds import policy_that_acts, starts
from toy_runs import as_lines, evaluated, write_records

from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorConfig
from vla_rl.errors import CheckpointError
from vla_rl.evaluation import HeldOutEvaluator
from vla_rl.evaluation.checkpoint_evaluator import evaluator_settings
from vla_rl.evaluation.held_out_curve import Best, curve_points, read_curve
from vla_rl.evaluation.held_out_schedule import HeldOutSchedule, trend_window
from vla_rl.evaluation.record_file import read_records
from vla_rl.evaluation.records import SUCCESSES, EpisodeRecord, choosing_format, episode_key
from vla_rl.learner.checkpoint.folders import (
    best_checkpoint,
    list_checkpoints,
    prune,
    set_best,
    set_newer_aside,
)
from vla_rl.reporting import RunDirectory
from vla_rl.run import background_evaluation
from vla_rl.run.background_evaluation import BackgroundEvaluation
from vla_rl.run.training_run import print_curve
from vla_rl.types import Config, EpisodeSpec

CHOOSE, REPORT = starts(8)[:4], starts(8)[4:]
RUN_SIMULATORS = SimulatorConfig(num_envs=5)


def record(version: int, episode: EpisodeSpec, is_success: bool) -> EpisodeRecord:
    return evaluated(episode.task, episode.options["init_state_id"], is_success, weights=version)


class Evaluations:
    """Stands in for evaluator processes: each ends when the test lets it.

    Args:
        solved: number of the starts that choose which each version solves.
        reported: that of the starts that are reported.
    """

    def __init__(self, solved: dict[int, int], reported: dict[int, int]) -> None:
        self._solved, self._reported = solved, reported
        self.started: list[int] = []
        """Versions that ran the starts that choose."""
        self.reported: list[int] = []
        """Versions that ran those that are reported."""
        self.simulators: list[int] = []
        self._may_end: dict[int, asyncio.Event] = {}
        self._has_started: dict[int, asyncio.Event] = {}

    async def __call__(
        self,
        runtime: Any,
        settings: Any,
        run: Any,
        version: int,
        policy: Path,
        missing: Any,
        done: Any,
    ) -> None:
        if missing()[0] in REPORT:
            self.reported.append(version)
            for number, episode in enumerate(missing()):
                await done(record(version, episode, number < self._reported.get(version, 0)))
            return
        self.started.append(version)
        self.simulators.append(settings.simulators.num_envs)
        self._event(self._has_started, version).set()
        await self._event(self._may_end, version).wait()
        for number, episode in enumerate(missing()):
            await done(record(version, episode, number < self._solved.get(version, 0)))

    def let_end(self, *versions: int) -> None:
        for version in versions:
            self._event(self._may_end, version).set()

    async def begins(self, version: int) -> None:
        await self._event(self._has_started, version).wait()

    def _event(self, events: dict[int, asyncio.Event], version: int) -> asyncio.Event:
        return events.setdefault(version, asyncio.Event())


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "evaluated", Config())


def save(run: RunDirectory, *versions: int) -> None:
    """Make what counts as a complete checkpoint of each version."""
    for version in versions:
        folder = run.checkpoints / f"update-{version:06d}"
        folder.mkdir()
        (folder / "manifest.json").write_text("{}")


def names_in(run: RunDirectory) -> list[str]:
    return [folder.name for folder in list_checkpoints(run.checkpoints)]


class World:
    """What a run would give to `BackgroundEvaluation`, and what came back."""

    def __init__(
        self,
        run: RunDirectory,
        solved: dict[int, int],
        monkeypatch: pytest.MonkeyPatch,
        reported: dict[int, int] | None = None,
        **schedule: Any,
    ) -> None:
        self.evaluations = Evaluations(solved, reported or {})
        monkeypatch.setattr(background_evaluation, "evaluate_checkpoint", self.evaluations)
        self.run, self._schedule = run, HeldOutSchedule(**{"every": 2, **schedule})
        self.noted: list[tuple[int, float]] = []
        """Each version's result on the starts that choose."""
        self.noted_report: list[tuple[int, float]] = []
        self.all_noted: dict[int, asyncio.Event] = {}

    def open(self, first: int = 0) -> BackgroundEvaluation:
        evaluator = HeldOutEvaluator(REPORT, choose=CHOOSE, schedule=self._schedule)
        settings = evaluator_settings(
            policy_that_acts(0),
            "success_rate",
            None,
            SimulatorConfig(),
            torch_threads=1,
            niceness=1,
        )
        return BackgroundEvaluation(
            evaluator,
            settings,
            self.run,
            Runtime("evaluated"),
            first=first,
            note=self._note,
        )

    async def is_noted(self, version: int) -> None:
        await self.all_noted.setdefault(version, asyncio.Event()).wait()

    async def _note(self, version: int, metrics: dict[str, float]) -> None:
        if "held_out/success_rate" in metrics:
            self.noted_report.append((version, metrics["held_out/success_rate"]))
            return
        self.noted.append((version, metrics["held_out_choose/success_rate"]))
        self.all_noted.setdefault(version, asyncio.Event()).set()


async def test_the_newest_of_the_versions_that_wait_is_evaluated_and_one_line_names_the_skipped(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(run, {0: 1, 4: 3, 5: 2}, monkeypatch)
    async with asyncio.timeout(20), world.open() as evaluation:
        for version in (0, 2, 4):
            save(run, version)
            evaluation.offer(version)
            await world.evaluations.begins(0)
        assert evaluation.kept() == {0, 4}
        prune(run.checkpoints, 1, evaluation.kept())
        assert names_in(run) == ["update-000000", "update-000004"]
        world.evaluations.let_end(0, 4, 5)
        await world.is_noted(4)
        save(run, 5)
        await evaluation.finish(5, RUN_SIMULATORS)
    assert world.evaluations.started == [0, 4, 5]
    assert world.evaluations.simulators == [1, 1, 5]
    assert world.noted == [(0, 0.25), (4, 0.75), (5, 0.5)]
    said = [each for each in capsys.readouterr().out.splitlines() if "skipped" in each]
    assert len(said) == 1
    assert said[0].startswith(
        "held-out episodes of weights 2 are skipped: those of weights 0 still run, and weights 4 "
    )
    curve = read_curve(run)
    assert curve is not None
    assert curve.skipped == (2,)
    assert curve == evaluation.curve
    assert [point.weights for point in curve.chose] == [0, 4, 5]
    assert [point.weights for point in curve.report] == [0, 4, 5]
    # odd starts and even ones are two tasks
    assert {task: mean.mean for task, mean in curve.chose[1].tasks.items()} == {
        "uneven/0": 1.0, "uneven/1": 0.5,
    }  # fmt: skip


async def test_the_best_checkpoint_is_kept_by_name_and_is_never_removed(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(run, {0: 1, 2: 3, 4: 3, 6: 2}, monkeypatch)
    world.evaluations.let_end(0, 2, 4, 6)
    async with asyncio.timeout(20), world.open() as evaluation:
        for version in (0, 2, 4):
            save(run, version)
            evaluation.offer(version)
            await world.is_noted(version)
        save(run, 6)
        await evaluation.finish(6, RUN_SIMULATORS)
        prune(run.checkpoints, 1)
    assert names_in(run) == ["update-000002", "update-000006"]
    assert best_checkpoint(run.checkpoints) == run.checkpoints / "update-000002"
    assert (run.checkpoints / "best" / "manifest.json").is_file()
    # a run that is resumed from an older checkpoint sets the best one aside
    set_newer_aside(run.checkpoints, run.checkpoints / "update-000001")
    assert best_checkpoint(run.checkpoints) is None
    set_best(run.checkpoints, None)
    assert not (run.checkpoints / "best").is_symlink()


async def test_the_starts_that_choose_a_checkpoint_do_not_report_it(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights 4 solve all of the four starts that choose, and two of the four others."""
    solved, reported = {0: 1, 2: 2, 4: 4, 6: 3, 8: 3}, {0: 1, 4: 2, 8: 3}
    world = World(run, solved, monkeypatch, reported)
    world.evaluations.let_end(*solved)
    async with asyncio.timeout(20), world.open() as evaluation:
        for version in (0, 2, 4, 6):
            save(run, version)
            evaluation.offer(version)
            await world.is_noted(version)
        save(run, 8)
        await evaluation.finish(8, RUN_SIMULATORS)
    # the first, the last and the best, and no others
    assert world.evaluations.reported == [0, 8, 4]
    assert world.noted_report == [(0, 0.25), (8, 0.75), (4, 0.5)]
    for format, episodes in ((SUCCESSES, REPORT), (choosing_format(SUCCESSES), CHOOSE)):
        records = read_records(run.path / format.file)
        assert {record.episode_key for record in records} == set(map(episode_key, episodes))
    stored = json.loads((run.path / "held_out_curve.json").read_text())
    assert stored["best"]["weights"] == 4
    assert (stored["best"]["report"][:2], stored["best"]["chose"][:2]) == ([4, 0.5], [4, 1.0])
    assert list(stored["best"]) == ["weights", "report", "chose"]
    assert [each["weights"] for each in stored["report"]] == [0, 4, 8]
    assert [each["weights"] for each in stored["chose"]] == [0, 2, 4, 6, 8]

    capsys.readouterr()
    print_curve(evaluation.curve, run, 8)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == (
        "held out: final weights 8: 3 of 4 starts solved = 75 % (95 %: 30 to 95); weights 0: 1 of 4 "
        "starts solved = 25 % (95 %: 5 to 70); best: weights 4: 2 of 4 starts solved = 50 % (95 %: "
        f"15 to 85), chose with 100 % of 4 other starts, {run.checkpoints / 'best'}"
    )
    titles = [each.strip() for each in lines if each.strip().startswith(("Held-out", "Starts"))]
    assert titles == ["Held-out starts", "Starts that chose the best checkpoint, during training"]


async def test_a_run_that_was_stopped_reports_what_a_resume_has_to_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(run, {0: 1, 2: 3}, monkeypatch, {0: 2, 2: 1, 4: 4})
    world.evaluations.let_end(0, 2, 4)
    async with asyncio.timeout(20), world.open() as evaluation:
        for version in (0, 2):
            save(run, version)
            evaluation.offer(version)
            await world.is_noted(version)
    print_curve(evaluation.curve, run, 3)
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line.startswith("held out: final weights 3 are not reported yet; ")
    assert "best: weights 2: not reported yet, chose with 75 % of 4 other starts" in last_line
    save(run, 4)
    async with asyncio.timeout(20), world.open(first=4) as again:
        await again.finish(4, RUN_SIMULATORS)
    assert again.curve.best is not None
    assert again.curve.best.report is not None
    assert again.curve.best.report.mean == 0.25
    # each version once, whatever was done before the stop
    assert sorted(world.evaluations.reported) == [0, 2, 4]


async def test_a_run_from_before_there_were_two_sets_goes_on_with_one(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights 0 and 2 ran the reported starts, and weights 2 are the best."""
    earlier = [record(version, each, version == 2) for version in (0, 2) for each in REPORT]
    write_records(run.path / SUCCESSES.file, earlier)
    mean = {0: [4, 0.0, 0.0, 0.49], 2: [4, 1.0, 0.51, 1.0]}
    points = [{"weights": each, "all": mean[each], "tasks": {}} for each in (0, 2)]
    old = {"measure": "success_rate", "points": points, "skipped": [1]}
    (run.path / "held_out_curve.json").write_text(json.dumps(old))
    save(run, 2, 4)
    set_best(run.checkpoints, run.checkpoints / "update-000002")
    world = World(run, {}, monkeypatch, {4: 3})
    for _ in range(2):  # a second resume finds what the first one wrote
        async with asyncio.timeout(20), world.open(first=4) as evaluation:
            await evaluation.finish(4, RUN_SIMULATORS)
    assert world.evaluations.started == []
    assert world.evaluations.reported == [4]
    curve = read_curve(run)
    assert curve is not None
    assert curve.has_one_set
    assert curve.report == ()
    assert [(each.weights, each.all.mean) for each in curve.chose] == [(0, 0), (2, 1), (4, 0.75)]
    assert curve.best == Best(2, None, curve.chose[1].all)
    assert best_checkpoint(run.checkpoints) == run.checkpoints / "update-000002"
    assert not (run.path / choosing_format(SUCCESSES).file).exists()
    said = capsys.readouterr().out
    assert said.count("was begun with one set of held-out starts") == 2
    print_curve(curve, run, 4)
    assert "best, by the starts that chose it: weights 2: 4 of 4" in capsys.readouterr().out


async def test_evaluations_without_gain_ask_the_run_to_stop(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    patience, window = 2, trend_window(4, 2)
    versions = list(range(0, 2 * window, 2))
    world = World(run, dict.fromkeys(versions, 4), monkeypatch, stop_after=patience)
    world.evaluations.let_end(*versions)
    async with asyncio.timeout(20), world.open() as evaluation:
        for version in versions:
            assert not evaluation.has_stopped_gaining.is_set()
            save(run, version)
            evaluation.offer(version)
            await world.is_noted(version)
        await asyncio.wait_for(evaluation.has_stopped_gaining.wait(), 5)
    said = capsys.readouterr().out
    assert (
        f"--held-out.stop-after 2: 4 starts are too few to tell within 4 evaluations whether a "
        f"policy still gains 2 points an evaluation; the run stops after {window - 1} evaluations "
        "without gain" in said.splitlines()[0]
    )
    assert "stopping: the trend of the newest evaluations is below 2 points" in said


async def test_a_resumed_run_finishes_what_ran_and_what_waited_and_runs_no_start_twice(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = World(run, {}, monkeypatch)
    async with asyncio.timeout(20), killed.open() as evaluation:
        for version in (0, 2, 4):
            save(run, version)
            evaluation.offer(version)
            await killed.evaluations.begins(0)
    # three starts of weights 0 had ended, and the line of the fourth was cut off
    lines = as_lines(record(0, episode, True) for episode in CHOOSE).splitlines(keepends=True)
    path = run.path / choosing_format(SUCCESSES).file
    path.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    world = World(run, {0: 1, 4: 2}, monkeypatch)
    world.evaluations.let_end(0, 4)
    async with asyncio.timeout(20), world.open(first=4) as evaluation:
        assert evaluation.kept() == {0, 4}  # 2 had been skipped
        await evaluation.finish(4, RUN_SIMULATORS)
    assert world.noted == [(0, 1.0), (4, 0.5)]
    assert sorted(world.evaluations.reported) == [0, 4]
    for file, episodes in ((path, CHOOSE), (run.path / SUCCESSES.file, REPORT)):
        assert sorted((each.weights, each.episode_key) for each in read_records(file)) == sorted(
            (version, episode_key(episode)) for version in (0, 4) for episode in episodes
        )


async def test_weights_whose_checkpoint_found_no_room_are_left_out_with_one_line(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(run, {}, monkeypatch)

    async def save_nothing() -> None:
        """As on a full disk."""

    async with asyncio.timeout(20), world.open() as evaluation:
        await evaluation.begin(save_nothing)
        evaluation.update_ended(1, False)  # not due
        assert evaluation.kept() == {0}
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "weights 0 are not evaluated on held-out starts, because their checkpoint could not be "
        "written"
    ]


async def test_an_evaluation_that_fails_ends_the_run_with_its_own_error(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(run, {}, monkeypatch)

    async def train() -> None:
        async with asyncio.timeout(20), world.open() as evaluation:
            evaluation.offer(2)
            await asyncio.Event().wait()  # until it is cancelled

    with pytest.raises(CheckpointError, match="has no checkpoint of update 2, which its held-out"):
        await train()


def test_a_version_that_lacks_one_episode_has_no_point() -> None:
    keys = list(map(episode_key, CHOOSE))
    # the three that ended first are successes, as short episodes are
    records = [record(8, episode, True) for episode in CHOOSE[:3]]
    assert curve_points(records, keys, "success_rate") == ()
    records.append(record(8, CHOOSE[3], False))
    (point,) = curve_points(records, keys, "success_rate")
    assert (point.all.episodes, point.all.mean) == (4, 0.75)


def test_the_options_of_evaluations_beside_training_need_an_interval() -> None:
    assert set(HeldOutSchedule().unused_options()) == {"simulators", "niceness", "stop_after"}
    assert HeldOutSchedule(every=3).unused_options() == {}
