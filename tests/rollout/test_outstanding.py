"""Outstanding groups begin oldest first and are complete with their last member."""

import msgspec
import pytest
from rollout_fakes import finished, source

from vla_rl.rollout.episode_records import GroupState, OutstandingGroups
from vla_rl.types import Shelved


def test_a_lost_episode_begins_again_before_any_newer_one() -> None:
    groups, plans = OutstandingGroups(), source(group_size=2)
    groups.add(plans.next_group(), 0)
    groups.add(plans.next_group(), 0)
    lost = groups.next_episode()
    assert lost is not None
    groups.begin_again(msgspec.structs.replace(lost, attempt=1))
    begun = [groups.next_episode() for _ in range(4)]
    assert [(each.episode_id, each.attempt) for each in begun if each is not None] == [
        (0, 1),
        (1, 0),
        (2, 0),
        (3, 0),
    ]
    assert groups.next_episode() is None


def test_the_last_member_completes_a_group_in_the_order_of_members() -> None:
    groups, plan = OutstandingGroups(), source(group_size=2).next_group()
    groups.add(plan, dispatch_version=3)
    assert groups.finish(finished(plan.episodes[1])) is None
    assert groups.missing(0) == [0]
    assert groups.num_played() == (0, 1)
    group = groups.finish(finished(plan.episodes[0]))
    assert group is not None
    assert [each.episode.member for each in group.trajectories] == [0, 1]
    assert group.dispatch_version == 3
    assert groups.num_played() == (2, 0)


def test_a_removed_group_takes_its_waiting_episodes_along() -> None:
    groups, plans = OutstandingGroups(), source(group_size=2)
    groups.add(plans.next_group(), 0)
    groups.add(plans.next_group(), 0)
    assert groups.remove(0).group_id == 0
    assert groups.num_to_begin == 2
    with pytest.raises(KeyError):
        groups.missing(0)


def test_a_saved_group_goes_on_with_the_members_that_it_lacks() -> None:
    groups, plan = OutstandingGroups(), source(group_size=2).next_group()
    half = GroupState(plan=plan, dispatch_version=1, trajectories=(finished(plan.episodes[0]),))
    assert groups.add_played(half) is None
    assert groups.next_episode() == plan.episodes[1]
    (saved,) = groups.state()
    assert (saved.plan, saved.dispatch_version, saved.is_complete) == (plan, 1, False)


def test_a_member_whose_pictures_end_with_the_run_is_run_again_after_a_resume() -> None:
    groups, plan = OutstandingGroups(), source(group_size=2).next_group()
    groups.add(plan, dispatch_version=3)
    beside = Shelved(host="", key=1, num_bytes=10)
    groups.finish(msgspec.structs.replace(finished(plan.episodes[0]), shelved=beside))
    groups.finish(finished(plan.episodes[1]))
    assert groups.num_played() == (2, 0)
    (saved,) = groups.state()
    assert [each.episode.member for each in saved.trajectories] == [1]
    resumed = OutstandingGroups()
    assert resumed.add_played(saved) is None
    assert resumed.next_episode() == plan.episodes[0]
    assert resumed.num_played() == (0, 1)
