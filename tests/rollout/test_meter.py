"""Metrics are rates since the last report and totals since the start."""

import numpy as np
import pytest
from rollout_fakes import source

from vla_rl.rollout import DecisionCounter
from vla_rl.rollout.counts import RolloutMetrics
from vla_rl.types import ActionChunk, Group, Info, Step, StopReason, Trajectory


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
    meter = RolloutMetrics(DecisionCounter().counts)
    meter.start(10.0)
    meter.episode(episode(1.0, StopReason.SUCCESS))
    meter.lost("died")
    first = meter.report(12.0, {"groups_buffered": 3}, {"stale": 2})
    assert (first["rollout/episodes_per_s"], first["rollout/env_steps_per_s"]) == (0.5, 1.0)
    assert (first["rollout/success_rate"], first["rollout/mean_return"]) == (1.0, 1.0)
    assert (first["rollout/depth/groups_buffered"], first["rollout/dropped/stale"]) == (3.0, 2.0)
    second = meter.report(14.0, {}, {})
    assert (second["rollout/episodes_per_s"], second["rollout/lost/died"]) == (0.0, 1.0)


def test_episodes_that_the_agent_ended_are_counted_by_reason_since_the_start() -> None:
    meter = RolloutMetrics(DecisionCounter().counts)
    for reason in (StopReason.REPLY_REJECTED, StopReason.SUCCESS, StopReason.TIME_LIMIT):
        meter.episode(episode(0.0, reason))
    assert meter.report(1.0, {}, {})["rollout/stopped/reply_rejected"] == 1.0
    meter.episode(episode(0.0, StopReason.REPLY_REJECTED))
    second = meter.report(2.0, {}, {})
    stopped = {name: value for name, value in second.items() if "/stopped/" in name}
    assert stopped == {"rollout/stopped/reply_rejected": 2.0}


def test_a_success_that_is_never_reported_is_no_failure() -> None:
    meter = RolloutMetrics(DecisionCounter().counts)
    meter.episode(episode(0.0, StopReason.TIME_LIMIT))
    assert "rollout/success_rate" not in meter.report(1.0, {}, {})
    meter.episode(episode(0.0, StopReason.TIME_LIMIT, {"is_success": False}))
    assert meter.report(2.0, {}, {})["rollout/success_rate"] == 0.0


def test_staleness_is_that_of_the_groups_trained_since_the_last_report() -> None:
    meter = RolloutMetrics(DecisionCounter().counts)
    for dispatch_version in (2, 3, 3, 3):
        group = Group(group_id=0, trajectories=(), dispatch_version=dispatch_version)
        meter.trained(group, version=3)
    metrics = meter.report(1.0, {}, {})
    assert metrics["rollout/staleness/mean"] == pytest.approx(0.25)
    assert (metrics["rollout/staleness/max"], metrics["rollout/staleness/share_1"]) == (1.0, 0.25)
    assert "rollout/staleness/mean" not in meter.report(2.0, {}, {})
