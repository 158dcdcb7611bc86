"""Every episode is in one place, whatever becomes of it: counts, records, losses that end a run, rates since
the last report."""

import logging

import msgspec
import numpy as np
import pytest
from rollout_fakes import finished, group_of, source

from vla_rl.errors import ConservationError
from vla_rl.rollout import DecisionCounter, EpisodeLedger, SchedulerConfig
from vla_rl.rollout.counts import MAX_HOST_LOSSES, WARN_EVERY, Attempts, GroupFilter, RolloutMetrics
from vla_rl.rollout.episode_records import EpisodeRecords, GroupState, OutstandingGroups
from vla_rl.rollout.episode_runner import EpisodeLost
from vla_rl.types import (
    ActionChunk,
    EnvSpec,
    EpisodeSpec,
    Group,
    ImageCacheRef,
    Info,
    Step,
    StopReason,
    Trajectory,
)


def booked() -> EpisodeLedger:
    """20 dispatched, 8 trained, 4 filtered, 2 dropped: 6 are somewhere."""
    ledger = EpisodeLedger()
    ledger.count_dispatched(20)
    ledger.count_trained(8)
    ledger.count_filtered(4)
    ledger.count_dropped(2, "stale")
    return ledger


def test_episodes_that_add_up_pass() -> None:
    booked().check_conservation(in_flight=4, buffered=2)


def test_what_was_counted_since_a_resume_leaves_out_all_before() -> None:
    before = booked().state()
    ledger = EpisodeLedger(before)
    ledger.count_dispatched(5)
    ledger.count_filtered(3)
    ledger.count_dropped(1, "stale")
    ledger.count_dropped(1, "lost")
    since = ledger.state().since(before)
    assert (since.dispatched, since.trained, since.filtered) == (5, 0, 3)
    assert since.dropped == {"stale": 1, "lost": 1}


def test_a_lost_episode_is_reported_with_the_whole_table() -> None:
    with pytest.raises(
        ConservationError, match="20 episodes were dispatched, 19 are accounted for"
    ) as caught:
        booked().check_conservation(in_flight=3, buffered=2)
    for row in ("trained", "filtered", "dropped (stale)", "in flight", "buffered"):
        assert row in str(caught.value)


def test_an_episode_held_twice_is_reported() -> None:
    with pytest.raises(ConservationError, match="21 are accounted for"):
        booked().check_conservation(in_flight=4, buffered=3)


def test_a_ledger_goes_on_from_its_state() -> None:
    EpisodeLedger(booked().state()).check_conservation(in_flight=6, buffered=0)


def lost(number: int = 0, *, with_host: bool = False) -> EpisodeLost:
    episode = EpisodeSpec(
        episode_id=number,
        group_id=0,
        member=0,
        env=EnvSpec(id="none"),
        task="none",
        seed=0,
        policy_seed=0,
    )
    return EpisodeLost(episode, "died", "SIGKILL", with_host=with_host)


def test_the_last_attempt_is_not_followed_by_another() -> None:
    attempts = Attempts(3)
    assert [attempts.allow(lost()) for _ in range(2)] == [True, True]
    last = lost()
    assert not attempts.allow(last)
    assert last.__notes__ == ["that was the last of max_attempts=3"]


def test_losses_of_a_host_are_no_fault_of_its_episodes_until_there_are_many() -> None:
    attempts = Attempts(1)
    for _ in range(MAX_HOST_LOSSES - 1):
        assert attempts.allow(lost(with_host=True))
    last = lost(with_host=True)
    assert not attempts.allow(last)
    assert last.__notes__ == ["10 hosts were lost while they ran it, so it may be what ends them"]


def test_both_kinds_of_loss_are_counted_apart() -> None:
    attempts = Attempts(2)
    assert attempts.allow(lost())
    assert attempts.allow(lost(with_host=True))
    assert not attempts.allow(lost())


@pytest.mark.parametrize("with_host", [False, True])
def test_episodes_are_counted_apart_and_one_that_ended_is_forgotten(with_host: bool) -> None:
    attempts = Attempts(2)
    assert attempts.allow(lost(0, with_host=with_host))
    assert attempts.allow(lost(1, with_host=with_host))
    attempts.forget_episode(0)
    attempts.forget_episode(5)  # it was never lost
    assert attempts.allow(lost(0, with_host=with_host))
    assert attempts.allow(lost(1, with_host=with_host)) == with_host


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


def episode(reward: float, reason: StopReason, info: Info | None = None) -> Trajectory:
    chunk = ActionChunk(
        actions=np.zeros((2, 1), np.float32),
        tokens=np.zeros(2, np.int64),
        log_probs=np.zeros(2, np.float32),
        weight_version=0,
    )
    step = Step(observation={}, chunk=chunk, rewards=np.array([0.0, reward], np.float32))
    return Trajectory(
        episode=source(1).next_group().episodes[0],
        steps=(step,),
        final_observation={},
        stop_reason=reason,
        info=info or {},
    )


def test_rates_begin_anew_with_every_report_and_losses_do_not() -> None:
    counts = RolloutMetrics(DecisionCounter().counts)
    counts.start_window(10.0)
    counts.count_episode(episode(1.0, StopReason.SUCCESS))
    counts.count_lost("died")
    first = counts.report(12.0, {"groups_buffered": 3}, {"stale": 2})
    assert (first["rollout/episodes_per_s"], first["rollout/env_steps_per_s"]) == (0.5, 1.0)
    assert first["rollout/env_steps"] == 2.0
    assert (first["rollout/success_rate"], first["rollout/mean_return"]) == (1.0, 1.0)
    assert (first["rollout/depth/groups_buffered"], first["rollout/dropped/stale"]) == (3.0, 2.0)
    second = counts.report(14.0, {}, {})
    assert (second["rollout/episodes_per_s"], second["rollout/lost/died"]) == (0.0, 1.0)
    assert second["rollout/env_steps"] == 0.0


def test_control_steps_that_an_expert_planned_are_counted_beside_those_that_ran() -> None:
    counts = RolloutMetrics(DecisionCounter().counts)
    counts.count_episode(episode(1.0, StopReason.SUCCESS))
    assert "rollout/planned_steps" not in counts.report(1.0, {}, {})
    counts.count_episode(episode(1.0, StopReason.SUCCESS, {"planned_steps": 16}))
    counts.count_episode(episode(1.0, StopReason.SUCCESS, {"planned_steps": "of somebody else"}))
    found = counts.report(2.0, {}, {})
    assert (found["rollout/env_steps"], found["rollout/planned_steps"]) == (4.0, 16.0)


def test_episodes_that_the_agent_ended_are_counted_by_reason_since_the_start() -> None:
    counts = RolloutMetrics(DecisionCounter().counts)
    for reason in (StopReason.REPLY_REJECTED, StopReason.SUCCESS, StopReason.TIME_LIMIT):
        counts.count_episode(episode(0.0, reason))
    assert counts.report(1.0, {}, {})["rollout/stopped/reply_rejected"] == 1.0
    counts.count_episode(episode(0.0, StopReason.REPLY_REJECTED))
    second = counts.report(2.0, {}, {})
    stopped = {name: value for name, value in second.items() if "/stopped/" in name}
    assert stopped == {"rollout/stopped/reply_rejected": 2.0}


def test_a_success_that_is_never_reported_is_no_failure() -> None:
    counts = RolloutMetrics(DecisionCounter().counts)
    counts.count_episode(episode(0.0, StopReason.TIME_LIMIT))
    assert "rollout/success_rate" not in counts.report(1.0, {}, {})
    counts.count_episode(episode(0.0, StopReason.TIME_LIMIT, {"is_success": False}))
    assert counts.report(2.0, {}, {})["rollout/success_rate"] == 0.0


def test_staleness_is_that_of_the_groups_trained_since_the_last_report() -> None:
    counts = RolloutMetrics(DecisionCounter().counts)
    for dispatch_version in (2, 3, 3, 3):
        group = Group(group_id=0, trajectories=(), dispatch_version=dispatch_version)
        counts.count_trained(group, version=3)
    metrics = counts.report(1.0, {}, {})
    assert metrics["rollout/staleness/mean"] == pytest.approx(0.25)
    assert (metrics["rollout/staleness/max"], metrics["rollout/staleness/share_1"]) == (1.0, 0.25)
    assert "rollout/staleness/mean" not in counts.report(2.0, {}, {})


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
