"""Bench2Drive's table from records that are worked out by hand."""

import numpy as np
import pytest

from vla_rl.envs.driving.scores.bench2drive import RouteRecord, make_benchmark_table
from vla_rl.envs.driving.scores.comfort import (
    Ride,
    comfort_as_published,
    comfort_corrected,
    make_ride,
)


def test_penalties_multiply_for_each_event() -> None:
    crash = RouteRecord("1", "Completed", 100.0, {"collisions_vehicle": 2, "red_light": 1})
    assert crash.driving_score == pytest.approx(100 * 0.6 * 0.6 * 0.7)
    assert not crash.is_success
    off = RouteRecord("2", "Failed - Agent deviated from the route", 40.0, outside_route=25.0)
    assert off.driving_score == pytest.approx(30.0)
    assert not off.is_success


def test_only_min_speed_events_leave_the_success() -> None:
    slow = RouteRecord("1", "Completed", 100.0, speeds=(50.0, 150.0, 2000.0))
    assert slow.is_success
    assert slow.driving_score == 100.0
    assert slow.efficiency == 100.0
    assert RouteRecord("2", "Perfect", 100.0, speeds=(1500.0,)).efficiency is None


def test_missing_routes_count_as_0_of_220() -> None:
    records = [RouteRecord("1", "Perfect", 100.0), RouteRecord("2", "Failed", 10.0)]
    table = make_benchmark_table(records, "bench2drive220")
    assert table.driving_score == pytest.approx(110 / 220)
    assert table.success_rate == pytest.approx(1 / 220)
    assert (table.num_routes, table.efficiency) == (2, None)


def test_routes_of_another_set_and_routes_driven_twice_are_refused() -> None:
    one = RouteRecord("7", "Perfect", 100.0)
    with pytest.raises(ValueError, match="not of bench2drive220"):
        make_benchmark_table([one], "bench2drive220", route_ids=("1", "2"))
    with pytest.raises(ValueError, match="twice"):
        make_benchmark_table([one, one], "bench2drive220")


def test_a_gentle_turn_fails_as_published_and_passes_corrected() -> None:
    # 4 m/s at 0.2 rad/s is 11 degrees/s, which the benchmark compares with 0.95
    states = np.zeros((60, 11))
    states[:, 2] = 0.2 * np.arange(60) * 0.1
    states[:, 3], states[:, 6], states[:, 9] = 4.0, 0.8, 0.2
    ride = make_ride(states)
    assert comfort_as_published(ride) == 0.0
    assert comfort_corrected(ride) == 1.0


def test_a_short_last_segment_is_left_out() -> None:
    states = np.zeros((59, 11))
    states[:, 3] = 5.0
    states[41:, 5] = 6.0
    calm = make_ride(states)
    assert comfort_corrected(calm) == 1.0
    whole = Ride(*(np.concatenate([part, part[-1:]]) for part in vars(calm).values()))
    assert comfort_corrected(whole) == pytest.approx(2 / 3)
