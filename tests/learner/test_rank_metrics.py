"""Times of ranks as metrics, a timeline and words, worked out by hand."""

import pytest

from vla_rl.graph import Slice
from vla_rl.learner.distributed.rank_times import (
    RankTimes,
    describe_ranks,
    rank_metrics,
    rank_slices,
)

SLOW = RankTimes(
    jobs=[("update", 0.0, 8.0), ("step", 8.0, 9.0)],
    collectives=[("all-gather", 1.0, 1.5), ("reduce-scatter", 7.0, 8.0)],
    flops=600,
)
"""Computes 7.5 s of its 9 s."""

FAST = RankTimes(
    jobs=[("update", 0.0, 8.0), ("step", 8.0, 9.0)],
    collectives=[("all-gather", 0.5, 1.5), ("reduce-scatter", 4.0, 8.0)],
    flops=400,
)
"""Came half a second earlier to the first collective, and three seconds earlier to the second."""


def test_a_rank_that_comes_last_is_the_one_that_others_wait_for() -> None:
    metrics = rank_metrics([FAST, SLOW], 10.0, peak_flops=100.0)
    assert metrics == pytest.approx(
        {
            "rank/0/compute_s": 4.0,
            "rank/0/wait_s": 3.5,
            "rank/0/awaited_s": 0.0,
            "rank/0/mfu": 0.4,
            "rank/1/compute_s": 7.5,
            "rank/1/wait_s": 0.0,
            "rank/1/awaited_s": 3.5,
            "rank/1/mfu": 0.6,
            "ranks/communication_share": 0.15,
            "ranks/wait_share": 0.175,
        }
    )
    assert describe_ranks(metrics) == "ranks wait 18%, mostly for rank 1; communication 15%"


def test_ranks_without_a_collective_or_a_peak_have_the_rest_of_the_metrics() -> None:
    idle = RankTimes(jobs=[], collectives=[])
    metrics = rank_metrics([idle, idle], 2.0, None)
    assert set(metrics.values()) == {0.0}
    assert "rank/0/mfu" not in metrics
    assert describe_ranks({}) == ""


def test_the_timeline_has_two_lanes_a_rank() -> None:
    before = RankTimes(jobs=[("values", -2.0, -1.0)], collectives=[])
    lanes = rank_slices([before], [SLOW])
    assert [each.name for each in lanes["rank 0"]] == ["values", "update", "step"]
    assert lanes["rank 0, collectives"][1] == Slice("reduce-scatter", 7.0, 8.0)
