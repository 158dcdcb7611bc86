"""Complete groups wait for their update, and an update gets whole groups."""

import pytest
from rollout_fakes import group_of

from vla_rl.rollout.staleness import Handover, StalenessPolicy


def handover(max_staleness: int = 1) -> tuple[Handover, StalenessPolicy]:
    staleness = StalenessPolicy(max_staleness=max_staleness, groups_per_update=2)
    for group_id in range(4 if max_staleness else 2):
        staleness.admit(group_id, staleness.version)
    return Handover(staleness), staleness


def ids(groups: object) -> list[int]:
    return [group.group_id for group in groups]  # type: ignore[attr-defined]


def test_a_group_is_buffered_then_in_training_then_gone() -> None:
    groups, staleness = handover()
    groups.add(group_of(0))
    groups.add(group_of(1))
    assert (groups.num_buffered, groups.num_in_training) == (2, 0)
    assert groups.hand_over(0)
    assert groups.hand_over(0)
    assert (groups.num_buffered, groups.num_in_training) == (0, 2)
    groups.require_groups([group_of(1), group_of(0)], new_version=1)
    assert ids(groups.trained()) == [0, 1]
    assert (groups.num_in_training, staleness.version) == (0, 1)


def test_a_later_update_gets_nothing_before_the_earlier_one_is_full() -> None:
    groups, _ = handover()
    groups.add(group_of(0))
    assert not groups.hand_over(1)
    assert groups.hand_over(0)
    groups.add(group_of(1))
    groups.add(group_of(2))
    assert not groups.hand_over(1)
    assert groups.hand_over(0)
    assert groups.hand_over(1)
    assert (ids(groups.groups_of(0)), ids(groups.groups_of(1))) == ([0, 1], [2])


def test_groups_of_another_update_and_half_an_update_are_refused() -> None:
    groups, _ = handover()
    groups.add(group_of(0))
    groups.hand_over(0)
    with pytest.raises(ValueError, match=r"trained on groups \[3\] to version 1, expected .*\[0\]"):
        groups.require_groups([group_of(3)], new_version=1)
    with pytest.raises(ValueError, match="expected version 1"):
        groups.require_groups([group_of(0)], new_version=2)
    with pytest.raises(ValueError, match="update 0 has 1 of 2 groups so far"):
        groups.require_groups([group_of(0)], new_version=1)


def test_what_an_update_waits_for_is_its_oldest_running_group() -> None:
    groups, _ = handover(max_staleness=0)
    groups.add(group_of(1))
    assert groups.describe_wait(lambda group_id: [group_id * 10]) == (
        "2 of 2 groups, the oldest of 1 running is group 0: episodes 0"
    )
    groups.add(group_of(0))
    assert groups.describe_wait(lambda group_id: []) == "update 0 to be trained"


def test_groups_that_are_too_old_are_evicted_with_what_was_buffered() -> None:
    staleness = StalenessPolicy(max_staleness=0, groups_per_update=1, version=3)
    staleness.admit(5, dispatch_version=1)
    staleness.admit(6, dispatch_version=3)
    groups = Handover(staleness)
    groups.add(group_of(5))
    assert list(groups.evict()) == [5]
    assert groups.num_buffered == 0
