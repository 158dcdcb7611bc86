"""A filter keeps what it is told to keep, and does not filter for ever."""

import logging

import pytest
from rollout_fakes import group_of

from vla_rl.rollout.counts import WARN_EVERY, GroupFilter


def test_without_a_function_every_group_is_kept() -> None:
    assert GroupFilter(None, max_in_a_row=1).is_kept(group_of(0))


def test_a_kept_group_ends_the_row_of_filtered_ones() -> None:
    groups = GroupFilter(lambda group: group.group_id == 1, max_in_a_row=2)
    for group_id in (0, 1, 2):
        groups.is_kept(group_of(group_id))
        groups.require_some_kept(update=0)
    assert not groups.is_kept(group_of(3))
    with pytest.raises(RuntimeError, match=r"2 groups in a row .* so update 7 would never"):
        groups.require_some_kept(update=7)


def test_every_tenth_filtered_group_in_a_row_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    groups = GroupFilter(lambda group: False, max_in_a_row=None)
    with caplog.at_level(logging.WARNING):
        for group_id in range(2 * WARN_EVERY + 1):
            groups.is_kept(group_of(group_id))
            groups.require_some_kept(update=3)
    assert [record.args for record in caplog.records] == [(10, 3), (20, 3)]
