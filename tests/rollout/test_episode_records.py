"""The records have every dispatched episode in one place, oldest group first, whatever becomes of it."""

import msgspec
import pytest
from rollout_fakes import finished, source

from vla_rl.errors import ConservationError
from vla_rl.rollout import SchedulerConfig
from vla_rl.rollout.episode_records import EpisodeRecords, GroupState, OutstandingGroups
from vla_rl.types import EpisodeSpec, Group, ImageCacheRef


def make_records(max_staleness: int = 0, num_updates: int | None = None) -> EpisodeRecords:
    """A book of groups of two, one for each update."""
    config = SchedulerConfig(groups_per_update=1, max_staleness=max_staleness)
    return EpisodeRecords(source(group_size=2), config, num_updates)


def next_group(records: EpisodeRecords) -> Group:
    """Run the next two episodes; return their group."""
    episodes = [records.next_episode(0) for _ in range(2)]
    assert all(each is not None for each in episodes)
    groups = [records.groups.finish(finished(each)) for each in episodes if each is not None]
    assert groups[0] is None
    assert groups[1] is not None
    return groups[1]


def attempts(episodes: list[EpisodeSpec | None]) -> list[tuple[int, int] | None]:
    return [None if each is None else (each.episode_id, each.attempt) for each in episodes]


def test_a_group_is_admitted_for_an_idle_slot_and_not_beyond_the_bound_of_staleness() -> None:
    records = make_records()
    assert records.staleness.num_outstanding == 0
    started = [records.next_episode(0) for _ in range(3)]
    assert attempts(started) == [(0, 0), (1, 0), None]
    records.check_conservation(num_running=2)


def test_an_episode_that_is_lost_or_whose_arrays_are_begins_as_the_next_attempt() -> None:
    records = make_records()
    first, second = records.next_episode(0), records.next_episode(0)
    assert first is not None
    assert second is not None
    records.groups.finish(finished(second))
    records.queue_again(first)
    records.queue_lost(second)
    assert attempts([records.next_episode(0), records.next_episode(0)]) == [(0, 1), (1, 1)]
    records.check_conservation(num_running=2)


def test_a_group_that_is_filtered_makes_room_for_another_and_a_trained_one_raises_the_version() -> (
    None
):
    records = make_records()
    records.remove_filtered(next_group(records))
    kept = next_group(records)
    records.handover.add_group(kept)
    assert records.next_episode(0) is None
    assert records.handover.hand_over(0)
    assert [group.group_id for group in records.take_trained()] == [kept.group_id]
    assert records.version == 1
    records.check_conservation(num_running=0)
    assert records.state().ledger.filtered == records.state().ledger.trained == 2


def test_a_restored_book_goes_on_with_the_missing_members_and_drops_what_is_too_old() -> None:
    records = make_records(max_staleness=1)
    complete = next_group(records)
    records.handover.add_group(complete)
    began = records.next_episode(0)
    assert began is not None
    saved = records.state()
    again = make_records(max_staleness=1)
    again.restore(saved)
    again.check_conservation(num_running=0)
    assert again.handover.num_buffered == 1
    assert attempts([again.next_episode(0), again.next_episode(0)]) == [(2, 0), (3, 0)]

    # with one group for each update and no staleness, only one of the two can still be trained
    synchronous = make_records(max_staleness=0)
    synchronous.restore(saved)
    assert synchronous.dropped == {"stale": 2}
    synchronous.check_conservation(num_running=0)


def test_an_episode_that_is_nowhere_is_an_error_with_the_table() -> None:
    records = make_records()
    records.next_episode(0)
    with pytest.raises(ConservationError, match="2 episodes were dispatched, 1 are accounted"):
        records.check_conservation(num_running=0)


def test_a_lost_episode_begins_again_before_any_newer_one() -> None:
    groups, plans = OutstandingGroups(), source(group_size=2)
    groups.add_group(plans.next_group(), 0)
    groups.add_group(plans.next_group(), 0)
    lost = groups.next_episode()
    assert lost is not None
    groups.queue_episode(msgspec.structs.replace(lost, attempt=1))
    started = [groups.next_episode() for _ in range(4)]
    assert [(each.episode_id, each.attempt) for each in started if each is not None] == [
        (0, 1),
        (1, 0),
        (2, 0),
        (3, 0),
    ]
    assert groups.next_episode() is None


def test_the_last_member_completes_a_group_in_the_order_of_members() -> None:
    groups, plan = OutstandingGroups(), source(group_size=2).next_group()
    groups.add_group(plan, dispatch_version=3)
    assert groups.finish(finished(plan.episodes[1])) is None
    assert groups.missing(0) == [0]
    assert groups.count_finished() == (0, 1)
    group = groups.finish(finished(plan.episodes[0]))
    assert group is not None
    assert [each.episode.member for each in group.trajectories] == [0, 1]
    assert group.dispatch_version == 3
    assert groups.count_finished() == (2, 0)


def test_a_removed_group_takes_its_waiting_episodes_along() -> None:
    groups, plans = OutstandingGroups(), source(group_size=2)
    groups.add_group(plans.next_group(), 0)
    groups.add_group(plans.next_group(), 0)
    assert groups.remove_group(0).group_id == 0
    assert groups.num_to_begin == 2
    with pytest.raises(KeyError):
        groups.missing(0)


def test_a_saved_group_goes_on_with_the_members_that_it_lacks() -> None:
    groups, plan = OutstandingGroups(), source(group_size=2).next_group()
    half = GroupState(plan=plan, dispatch_version=1, trajectories=(finished(plan.episodes[0]),))
    assert groups.add_saved(half) is None
    assert groups.next_episode() == plan.episodes[1]
    (saved,) = groups.state()
    assert (saved.plan, saved.dispatch_version, saved.is_complete) == (plan, 1, False)


def test_a_member_whose_images_end_with_the_run_is_run_again_after_a_resume() -> None:
    groups, plan = OutstandingGroups(), source(group_size=2).next_group()
    groups.add_group(plan, dispatch_version=3)
    other = ImageCacheRef(host="", key=1, num_bytes=10)
    groups.finish(msgspec.structs.replace(finished(plan.episodes[0]), cached_images=other))
    groups.finish(finished(plan.episodes[1]))
    assert groups.count_finished() == (2, 0)
    (saved,) = groups.state()
    assert [each.episode.member for each in saved.trajectories] == [1]
    resumed = OutstandingGroups()
    assert resumed.add_saved(saved) is None
    assert resumed.next_episode() == plan.episodes[0]
    assert resumed.count_finished() == (0, 1)
