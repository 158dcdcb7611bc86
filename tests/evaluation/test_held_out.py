"""Held-out starts of a run: when they run, which choose, which report, the curve with its choice."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from small_worlds import starts
from toy_runs import as_lines, evaluated, scored, write_records

from vla_rl.errors import ConfigError
from vla_rl.evaluation import EpisodeRecord, HeldOutEvaluator
from vla_rl.evaluation.held_out import conditions_path
from vla_rl.evaluation.held_out_curve import (
    choose,
    curve_path,
    curve_points,
    make_curve,
    read_curve,
    write_curve,
)
from vla_rl.evaluation.held_out_schedule import (
    HeldOutSchedule,
    choosing_numbers,
    describe_noise,
    has_stopped_gaining,
    number_ranges,
    split_in_two,
    trend_window,
)
from vla_rl.evaluation.records import SCORES, Measure, episode_key
from vla_rl.recipes import driving_training, srpo_driving_loop, srpo_toy, suite_training, train_toy
from vla_rl.recipes.driving_training import HeldOutScenesConfig, make_scene_evaluator
from vla_rl.recipes.grpo_driving import GrpoDrivingConfig
from vla_rl.recipes.grpo_libero import GrpoLiberoConfig
from vla_rl.recipes.ppo_libero import PpoLiberoConfig
from vla_rl.recipes.srpo_driving import SrpoDrivingConfig
from vla_rl.recipes.srpo_driving_loop import SrpoDrivingLoopConfig
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig
from vla_rl.recipes.srpo_metaworld import SrpoMetaworldConfig
from vla_rl.recipes.srpo_toy import HeldOutReaches, SrpoToyConfig
from vla_rl.recipes.train_toy import HeldOutSeeds, TrainToyConfig
from vla_rl.reporting import RunDirectory
from vla_rl.types import Config, EnvSpec, EpisodeSpec, Sampling


def driving_episodes(num: int = 3, version: str = "epdms_v2") -> list[EpisodeSpec]:
    return [
        EpisodeSpec(
            episode_id=number,
            group_id=number,
            member=0,
            env=EnvSpec(id="vla_rl/driving-v0", kwargs={"version": version}),
            task="driving",
            options={"init_state_id": number},
            sampling=Sampling(greedy=True),
            seed=0,
            policy_seed=0,
        )
        for number in range(num)
    ]


@pytest.fixture
def other_run(tmp_path: Path) -> RunDirectory:
    """A run of policy p whose weights 0 and 4 have run three starts."""
    run = RunDirectory.create(tmp_path, "other", Config(), {"policy_digest": "p"})
    records = [scored(weights, start, 0.1 * start) for weights in (0, 4) for start in (2, 0, 1)]
    write_records(run.path / SCORES.file, records)
    evaluator = HeldOutEvaluator(driving_episodes(), format=SCORES)
    conditions_path(run).write_text(json.dumps(evaluator.conditions))
    return run


def evaluator_with_first_results(
    other_run: RunDirectory, wanted: list[EpisodeSpec] | None = None, policy: str = "p"
) -> HeldOutEvaluator:
    schedule = HeldOutSchedule(first_results_of=str(other_run.path))
    return HeldOutEvaluator(
        wanted or driving_episodes(), schedule=schedule, format=SCORES, policy_digest=policy
    )


def test_a_run_begins_with_the_first_results_of_another(
    other_run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory.create(tmp_path, "new", Config())
    file = evaluator_with_first_results(other_run).open_report(run)
    assert not file.list_missing(driving_episodes(), weights=0)
    assert len(file.list_missing(driving_episodes(), weights=4)) == 3
    assert file.records == [scored(0, start, 0.1 * start) for start in range(3)]
    assert file.path.read_bytes() == as_lines(file.records)
    assert (
        capsys.readouterr().out
        == f"the 3 held-out results of the first weights in {SCORES.file} are those of {other_run.path}\n"
    )


def test_a_resumed_run_keeps_its_own_results(other_run: RunDirectory, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "new", Config())
    write_records(run.path / SCORES.file, [scored(0, 1, 0.7)])
    file = evaluator_with_first_results(other_run).open_report(run)
    assert file.records == [scored(0, 1, 0.7)]


@pytest.mark.parametrize(
    ("policy", "wanted", "words"),
    [
        ("q", driving_episodes(), "started from the policy with the digest p, expected q"),
        ("", driving_episodes(), "this recipe makes its policy anew in each run"),
        ("p", driving_episodes(version="pdms_v1"), "version is 'pdms_v1' now"),
        ("p", driving_episodes(5), "lacks 2 of 5 held-out episodes of the first weights"),
    ],
    ids=["another policy", "a policy made anew", "other conditions", "other starts"],
)
def test_a_run_that_does_not_fit_is_refused_before_anything_starts(
    other_run: RunDirectory, policy: str, wanted: list[EpisodeSpec], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        evaluator_with_first_results(other_run, wanted, policy)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected the folder of a run"):
        evaluator_with_first_results(RunDirectory(tmp_path))


def test_results_without_their_conditions_are_refused(other_run: RunDirectory) -> None:
    conditions_path(other_run).unlink()
    with pytest.raises(ConfigError, match="expected the conditions of the results next to it"):
        evaluator_with_first_results(other_run)


KEYS = [("toy/0", start, 0, 0) for start in range(4)]


def successes(weights: int, *values: float) -> list[EpisodeRecord]:
    return [
        evaluated("toy/0", start, value > 0, weights=weights) for start, value in enumerate(values)
    ]


def test_scores_have_the_mean_and_the_bootstrap_interval_of_their_total() -> None:
    found = [
        scored(4, start, total, comfort=1.0) for start, total in enumerate((0.0, 0.5, 0.5, 1.0))
    ]
    (point,) = curve_points(found, [("", start, 0, 0) for start in range(4)], "score")
    curve = make_curve("score", [point])
    # the means of four drawn from these are k/8; 2.5 % of the 256 draws have at most .125 as theirs
    assert point.all == (4, 0.5, 0.125, 0.875)
    assert curve.describe(point.all) == "score 0.500 (95 %: 0.125 to 0.875) over 4 starts"
    assert curve.metrics_of(point)["held_out/score"] == 0.5


def test_the_earliest_of_equals_is_the_best() -> None:
    found = [
        *successes(0, 1, 0, 0, 0),
        *successes(2, 1, 1, 0, 0),
        *successes(4, 0, 0, 1, 1),
        *successes(6, 1, 0, 0, 0),
    ]
    best = choose(curve_points(found, KEYS, "success_rate"))
    assert best is not None
    assert best.weights == 2


def test_the_best_has_its_report_first_then_what_chose_it() -> None:
    chose = curve_points(
        [*successes(0, 1, 0, 0, 0), *successes(4, 1, 1, 1, 1)], KEYS, "success_rate"
    )
    report = curve_points(
        [*successes(0, 0, 0, 0, 0), *successes(4, 1, 1, 0, 0)], KEYS, "success_rate"
    )
    best = make_curve("success_rate", chose, report).best
    assert best is not None
    assert best.report is not None
    assert (best.weights, best.report.mean, best.chose.mean) == (4, 0.5, 1.0)
    unreported = make_curve("success_rate", chose, report[:1]).best
    assert unreported is not None
    assert unreported.report is None


def test_only_the_first_weights_the_best_and_the_newest_are_reported() -> None:
    every = [
        record for version in (0, 2, 4, 6) for record in successes(version, 1, 0, 0, version == 4)
    ]
    points = curve_points(every, KEYS, "success_rate")
    curve = make_curve("success_rate", points, points)
    assert [point.weights for point in curve.report] == [0, 4, 6]


def test_episodes_that_are_not_held_out_any_more_do_not_count() -> None:
    found = successes(0, 1, 1, 0, 0)
    (point,) = curve_points(found, KEYS[:2], "success_rate")
    assert (point.all.episodes, point.all.mean) == (2, 1.0)
    assert curve_points(found, [*KEYS, ("toy/0", 9, 0, 0)], "success_rate") == ()
    assert choose(curve_points([], [], "success_rate")) is None


def test_a_curve_is_read_as_it_was_written_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "curve", Config())
    assert read_curve(run) is None
    points = curve_points(successes(0, 1, 1, 0, 0), KEYS, "success_rate")
    curve = make_curve("success_rate", points, points, skipped=[2])
    write_curve(run, curve)
    assert read_curve(run) == curve
    curve_path(run).write_text("{")
    with pytest.raises(ConfigError, match=r"held_out_curve.json cannot be read.*remove it"):
        read_curve(run)


def test_without_evaluations_during_the_run_their_options_are_not_read() -> None:
    assert set(HeldOutSchedule().unused_options()) == {"simulators", "niceness", "stop_after"}
    assert not HeldOutSchedule(every=5).unused_options()


Sets = tuple[Sequence[EpisodeSpec], Sequence[EpisodeSpec]]


def evaluated_in_background(config: Any, **changed: Any) -> Any:
    """The configuration with evaluations beside training."""
    held_out = msgspec.structs.replace(config.held_out, every=5, **changed)
    return msgspec.structs.replace(config, held_out=held_out)


def scene_sets(module: Any, config: Any) -> Sets:
    evaluator = make_scene_evaluator(module.held_out_episodes(config), config.held_out, None, "p")
    return evaluator.episodes, evaluator.choose


def two_sets(config: Any) -> tuple[Sets, Measure]:
    if isinstance(config, TrainToyConfig):
        pair = train_toy.held_out_episodes(config), train_toy.choosing_episodes(config)
        return pair, "success_rate"
    if isinstance(config, SrpoToyConfig):
        pair = srpo_toy.held_out_episodes(config), srpo_toy.choosing_episodes(config)
        return pair, "success_rate"
    if isinstance(config, SrpoDrivingLoopConfig):
        return scene_sets(srpo_driving_loop, config), "score"
    if isinstance(config, driving_training.SceneTrainingConfig):
        return scene_sets(driving_training, config), "score"
    pair = suite_training.held_out_episodes(config), suite_training.choosing_episodes(config)
    return pair, "success_rate"


@pytest.mark.parametrize(
    ("config", "num_reported", "num_choosing"),
    [
        (SrpoLiberoConfig(), None, None),
        (GrpoLiberoConfig(), None, None),
        (PpoLiberoConfig(), None, None),
        (SrpoMetaworldConfig(), None, None),
        (SrpoToyConfig(held_out=HeldOutReaches(init_states="20-29")), 10, 10),
        (SrpoToyConfig(held_out=HeldOutReaches(init_states="12-16,19-29,31-49")), 35, 11),
        (TrainToyConfig(success_return=1.0, held_out=HeldOutSeeds(starts=64)), 64, 64),
        (
            TrainToyConfig(success_return=1.0, held_out=HeldOutSeeds(starts=64, choose_starts=9)),
            64,
            9,
        ),
        (GrpoDrivingConfig(), 500, 500),
        (SrpoDrivingConfig(held_out=HeldOutScenesConfig(scenes=20, choose_scenes=7)), 20, 7),
        (SrpoDrivingLoopConfig(), 500, 500),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_recipe_has_two_sets_that_follow_what_is_reported(
    config: Any, num_reported: int | None, num_choosing: int | None
) -> None:
    (report, choose), measure = two_sets(evaluated_in_background(config))
    keys = [{episode_key(each, measure) for each in found} for found in (report, choose)]
    assert not keys[0] & keys[1]
    assert (len(keys[0]), len(keys[1])) == (len(report), len(choose))
    if num_reported is None:  # by default as many choose as are reported
        num_reported = num_choosing = len(two_sets(config)[0][0])
    assert (len(report), len(choose)) == (num_reported, num_choosing)


def test_without_evaluations_beside_training_all_starts_are_reported_and_none_chooses() -> None:
    config = SrpoLiberoConfig()
    assert len(suite_training.held_out_episodes(config)) == 60
    assert suite_training.choosing_episodes(config) == []
    evaluator = HeldOutEvaluator(starts(4), choose=starts(8)[4:])
    assert (len(evaluator.episodes), evaluator.choose) == (4, ())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"choose_init_states": "45-60"},
            "'45-60', but 45, 46, 47, 48, 49 are in held_out.init_st",
        ),
        ({"choose_init_states": "39,60"}, "'39,60', but 39 are trained on too"),
        ({"init_states": "39-49"}, "the first 40 are trained on"),
    ],
)
def test_starts_of_both_sets_or_of_training_are_refused(
    changed: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        evaluated_in_background(SrpoLiberoConfig(), **changed)


def test_a_task_whose_starts_are_all_reported_has_none_to_choose_by() -> None:
    everything = ",".join(str(each) for each in range(50) if each not in (11, 17, 18, 30))
    config = SrpoToyConfig(held_out=HeldOutReaches(init_states=everything))
    with pytest.raises(ConfigError, match=r"none is left to choose the best checkpoint by"):
        evaluated_in_background(config)


def test_the_next_free_numbers_choose() -> None:
    assert choosing_numbers(None, (40, 41, 1000), range(40), 50, limit=2000) == (1001, 1002, 1003)
    assert choosing_numbers(None, (7, 9), (8,), 10) == (0, 1)
    assert number_ranges((3, 1, 2, 9)) == "1-3,9"


def test_an_own_list_of_episodes_is_split_task_by_task() -> None:
    report, choose = split_in_two(starts(7))
    assert [each.episode_id for each in report] == [0, 1, 4, 5]
    assert [each.episode_id for each in choose] == [2, 3, 6]
    evaluator = HeldOutEvaluator(starts(7), schedule=HeldOutSchedule(every=2))
    assert (evaluator.episodes, evaluator.choose) == (report, choose)


def test_an_episode_in_both_sets_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 held-out starts would choose the best checkpoint and"):
        HeldOutEvaluator(starts(4), choose=starts(2), schedule=HeldOutSchedule(every=2))


def test_scenes_that_a_folder_lacks_leave_a_set_for_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def sizes(num_found: int, **wanted: int) -> tuple[int, int]:
        held_out = HeldOutScenesConfig(every=5, **wanted)
        evaluator = make_scene_evaluator(starts(num_found), held_out, None, "p")
        return len(evaluator.episodes), len(evaluator.choose)

    assert sizes(100, scenes=50) == (50, 50)
    assert capsys.readouterr().out == ""
    assert sizes(80, scenes=50) == (50, 30)
    assert sizes(40, scenes=50) == (20, 20)  # half of all that there are
    assert (
        "40 held-out scenes were found: 20 are reported, and 20 choose" in capsys.readouterr().out
    )
    with pytest.raises(ConfigError, match="none is left to choose the best checkpoint by"):
        sizes(40, scenes=40, choose_scenes=10)


def first_stop(rates: list[float], starts: int, patience: int, seed: int) -> int | None:
    """Number of evaluations after which a run with these success rates stops."""
    draw = random.Random(seed)
    found: list[tuple[float, int]] = []
    for rate in rates:
        found.append((sum(draw.random() < rate for _ in range(starts)), starts))
        if has_stopped_gaining(found, patience):
            return len(found)
    return None


def test_a_policy_that_gains_evenly_goes_on_and_one_that_does_not_stops() -> None:
    rising = [(40 + 2 * number, 100) for number in range(21)]
    assert not any(has_stopped_gaining(rising[:number], 5) for number in range(22))
    flat = [(80, 100)] * 10
    stops = [number for number in range(11) if has_stopped_gaining(flat[:number], 5)]
    assert stops == [trend_window(100, 5)] == [10]
    assert has_stopped_gaining([*rising[:11], *[(60, 100)] * 10], 5)
    assert has_stopped_gaining([(100 - 3 * number, 100) for number in range(10)], 5)


def test_one_lucky_evaluation_does_not_stop_a_policy_that_gains() -> None:
    """The highest of all evaluations is the third, and all of the next ones are below it."""
    counts = [47, 49, 68, 53, 55, 57, 59, 61, 63, 65, 67]
    found = [(count, 100) for count in counts]
    assert not any(has_stopped_gaining(found[:number], 2) for number in range(12))


@pytest.mark.parametrize(("starts", "patience"), [(102, 5), (40, 8)])
def test_a_plateau_ends_a_run_within_twice_its_patience(starts: int, patience: int) -> None:
    assert trend_window(starts, patience) <= 2 * patience
    assert describe_noise(starts, patience) is None
    num = sum(
        first_stop([0.8] * 2 * patience, starts, patience, seed) is not None for seed in range(200)
    )
    assert num >= 160


@pytest.mark.parametrize("starts", [20, 102, 1000])
@pytest.mark.parametrize("patience", [1, 5, 12])
def test_few_runs_that_gain_two_points_an_evaluation_are_stopped(
    starts: int, patience: int
) -> None:
    rates = [0.47 + 0.02 * number for number in range(21)]
    num = sum(first_stop(rates, starts, patience, seed) is not None for seed in range(100))
    # 4 of 100 are expected at most; the highest of a hundred such trials is rarely above 12
    assert num <= 12


def test_few_starts_need_more_evaluations_and_one_line_says_how_many() -> None:
    assert describe_noise(40, 3) == (
        "--held-out.stop-after 3: 40 starts are too few to tell within 6 evaluations whether a policy "
        "still gains 2 points an evaluation; the run stops after 13 evaluations without gain"
    )
    assert trend_window(40, 3) == 14
    # many starts: the patience itself, and one evaluation to compare with
    assert trend_window(2000, 5) == 6
    assert trend_window(40, 30) == 31


def test_scores_are_sums_of_numbers_from_0_to_1() -> None:
    assert has_stopped_gaining([(250.5, 500)] * 8, 3)
    assert not has_stopped_gaining([(200 + 10.0 * number, 500) for number in range(8)], 3)


def test_without_enough_evaluations_nothing_is_stopped() -> None:
    assert not has_stopped_gaining([], 1)
    assert not has_stopped_gaining([(0, 10)] * 3, 1)
