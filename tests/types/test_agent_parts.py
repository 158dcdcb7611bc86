"""Episodes that several agents share, cut into what each of them did."""

import msgspec
import numpy as np

from vla_rl.types import (
    ActionChunk,
    EnvSpec,
    EpisodeSpec,
    Step,
    StopReason,
    Trajectory,
    agents_of,
    parts_of,
)


def episode(*turns: tuple[str, float], stop: StopReason = StopReason.TIME_LIMIT) -> Trajectory:
    chunk = ActionChunk(
        actions=np.zeros((1, 1)),
        tokens=np.zeros(1, np.int64),
        log_probs=np.zeros(1, np.float32),
        weight_version=0,
    )
    steps = tuple(
        Step(observation={}, chunk=chunk, rewards=np.array([reward], np.float32), agent=agent)
        for agent, reward in turns
    )
    spec = EpisodeSpec(
        episode_id=0, group_id=0, member=0, env=EnvSpec(id="x"), task="x", seed=0, policy_seed=0
    )
    return Trajectory(episode=spec, steps=steps, final_observation={}, stop_reason=stop)


SHARED = episode(("solver", 1.0), ("checker", 2.0), ("solver", 4.0))
ALONE = episode(("checker", 8.0))


def test_a_part_has_the_agents_decisions_and_knows_where_they_stood() -> None:
    assert agents_of([SHARED, ALONE]) == ["solver", "checker"]
    (solver,) = parts_of([ALONE, SHARED], "solver")
    assert (solver.row, solver.decisions) == (1, (0, 2))
    assert [step.rewards.tolist() for step in solver.trajectory.steps] == [[1.0], [4.0]]
    checker = parts_of([ALONE, SHARED], "checker")
    assert [(part.row, part.decisions) for part in checker] == [(0, (0,)), (1, (1,))]
    assert checker[0].trajectory is ALONE
    assert parts_of([SHARED], "nobody") == []


def test_only_who_decided_last_was_cut_off() -> None:
    (solver,), (checker,) = parts_of([SHARED], "solver"), parts_of([SHARED], "checker")
    assert solver.trajectory.stop_reason is StopReason.TIME_LIMIT
    assert checker.trajectory.stop_reason is StopReason.TERMINATED


def test_a_success_is_everybodys() -> None:
    (checker,) = parts_of(
        [msgspec.structs.replace(SHARED, stop_reason=StopReason.SUCCESS)], "checker"
    )
    assert checker.trajectory.is_success
    limited = msgspec.structs.replace(SHARED, stop_reason=StopReason.SUCCESS_AT_LIMIT)
    (solver,), (checker,) = parts_of([limited], "solver"), parts_of([limited], "checker")
    assert solver.trajectory.stop_reason is StopReason.SUCCESS_AT_LIMIT
    # the solver decided last: nothing more was to come
    assert checker.trajectory.stop_reason is StopReason.SUCCESS


def test_returns_are_counted_by_agent() -> None:
    assert SHARED.returns_by_agent == {"solver": 5.0, "checker": 2.0}
    assert SHARED.undiscounted_return == 7.0
