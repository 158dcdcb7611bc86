"""Episodes and groups that are left out of an update."""

import pytest
from small_episodes import PAIR, SILENT, group_of, shared, trajectory

from vla_rl.errors import EnvError
from vla_rl.pipelines.config import FilterConfig
from vla_rl.pipelines.nodes.run_parts import select_episodes
from vla_rl.run.parts import group_filter
from vla_rl.types import StopReason


@pytest.mark.parametrize(
    "config", [FilterConfig(accuracy_bounds=(0.1, 0.9)), FilterConfig(drop_equal="success")]
)
def test_a_filter_by_success_is_refused_if_success_is_unknown(config: FilterConfig) -> None:
    is_kept = group_filter(config)
    assert is_kept is not None
    with pytest.raises(EnvError, match="filters groups by success"):
        is_kept(SILENT)


def test_an_episode_that_was_cut_off_is_compared_but_not_learnt_from() -> None:
    ended, cut_off = trajectory([[1.0]], 0), trajectory([[1.0]], 1, StopReason.TIME_LIMIT)
    assert select_episodes([cut_off, ended], [-1.0, 1.0], mask_truncated=True) == ([1], [1.0])
    assert select_episodes([cut_off, ended], [-1.0, 1.0], mask_truncated=False) == (
        [0, 1],
        [-1.0, 1.0],
    )
    assert select_episodes([cut_off, cut_off], [-1.0, 1.0], mask_truncated=True) == ([], [])


def test_a_success_at_the_time_limit_was_judged_and_passes_the_filters() -> None:
    ended, in_time = trajectory([[1.0]], 0), trajectory([[1.0]], 1, StopReason.SUCCESS_AT_LIMIT)
    assert select_episodes([in_time, ended], [-1.0, 1.0], mask_truncated=True) == (
        [0, 1],
        [-1.0, 1.0],
    )
    keep = group_filter(FilterConfig(drop_truncated=True))
    assert keep is not None
    assert keep(group_of(ended, in_time))
    assert not keep(group_of(ended, trajectory([[1.0]], 1, StopReason.TIME_LIMIT)))


@pytest.mark.parametrize(
    ("config", "is_kept"),
    [
        (FilterConfig(accuracy_bounds=(0.1, 0.9)), True),
        (FilterConfig(accuracy_bounds=(0.6, 0.9)), False),
        (FilterConfig(drop_equal="success"), True),
        (FilterConfig(drop_equal="return"), True),
        (FilterConfig(drop_truncated=True), True),
    ],
)
def test_groups_that_are_worth_an_update_are_kept(config: FilterConfig, is_kept: bool) -> None:
    keep = group_filter(config)
    assert keep is not None
    assert keep(PAIR) is is_kept


def test_groups_that_teach_nothing_are_dropped_and_no_filter_keeps_everything() -> None:
    unsolved = {"is_success": False}
    equal = group_of(
        trajectory([[1.0, 1.0]], 0, info=unsolved),
        trajectory([[2.0]], 1, StopReason.TIME_LIMIT, unsolved),
    )
    kept = {
        config: keep(equal)
        for config in (
            FilterConfig(drop_equal="success"),
            FilterConfig(drop_equal="return"),
            FilterConfig(drop_truncated=True),
        )
        if (keep := group_filter(config)) is not None
    }
    assert list(kept.values()) == [False, False, False]
    assert group_filter(FilterConfig()) is None


def test_a_group_is_kept_where_one_agent_has_something_to_learn() -> None:
    keep = group_filter(FilterConfig(drop_equal="return"))
    assert keep is not None
    crossed = group_of(
        shared(0, ("solver", 1.0), ("checker", 0.0)), shared(1, ("solver", 0.0), ("checker", 1.0))
    )
    equal = group_of(
        shared(0, ("solver", 1.0), ("checker", 0.5)), shared(1, ("solver", 1.0), ("checker", 0.5))
    )
    assert keep(crossed)
    assert not keep(equal)
