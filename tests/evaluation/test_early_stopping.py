"""A run stops early if its evaluations show no gain, and not because one of them was lucky."""

import random

import pytest

from vla_rl.evaluation.early_stopping import describe_noise, has_stopped_gaining, trend_window


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
