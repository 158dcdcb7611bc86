"""Episodes are split by agent, for the member of the team that acts for each."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from vla_rl.errors import ConfigError
from vla_rl.types import (
    SOLE_MEMBER,
    ActionChunk,
    AgentNames,
    EnvSpec,
    EpisodeSpec,
    Step,
    StopReason,
    Trajectory,
    derive_seed,
    key_by_member,
    list_agents,
    split_by_agent,
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
    assert list_agents([SHARED, ALONE]) == ["solver", "checker"]
    (solver,) = split_by_agent([ALONE, SHARED], "solver")
    assert (solver.row, solver.decisions) == (1, (0, 2))
    assert [step.rewards.tolist() for step in solver.trajectory.steps] == [[1.0], [4.0]]
    checker = split_by_agent([ALONE, SHARED], "checker")
    assert [(part.row, part.decisions) for part in checker] == [(0, (0,)), (1, (1,))]
    assert checker[0].trajectory is ALONE
    assert split_by_agent([SHARED], "nobody") == []


def test_only_who_decided_last_was_cut_off() -> None:
    (solver,), (checker,) = split_by_agent([SHARED], "solver"), split_by_agent([SHARED], "checker")
    assert solver.trajectory.stop_reason is StopReason.TIME_LIMIT
    assert checker.trajectory.stop_reason is StopReason.TERMINATED


def test_a_success_is_everybodys() -> None:
    (checker,) = split_by_agent(
        [msgspec.structs.replace(SHARED, stop_reason=StopReason.SUCCESS)], "checker"
    )
    assert checker.trajectory.is_success
    limited = msgspec.structs.replace(SHARED, stop_reason=StopReason.SUCCESS_AT_LIMIT)
    (solver,), (checker,) = (
        split_by_agent([limited], "solver"),
        split_by_agent([limited], "checker"),
    )
    assert solver.trajectory.stop_reason is StopReason.SUCCESS_AT_LIMIT
    # the solver decided last: nothing more was to come
    assert checker.trajectory.stop_reason is StopReason.SUCCESS


def test_returns_are_counted_by_agent() -> None:
    assert SHARED.returns_by_agent == {"solver": 5.0, "checker": 2.0}
    assert SHARED.undiscounted_return == 7.0


ONE = AgentNames([SOLE_MEMBER])
PAIR = AgentNames(["solver", "checker"])


def make_episode(agents: Sequence[str]) -> Trajectory:
    chunk = ActionChunk(
        actions=np.zeros((1, 1), np.float32),
        tokens=np.zeros(1, np.int64),
        log_probs=np.zeros(1, np.float32),
        weight_version=0,
    )
    return Trajectory(
        episode=EpisodeSpec(
            episode_id=0,
            group_id=0,
            member=0,
            env=EnvSpec(id="x"),
            task="x",
            seed=0,
            policy_seed=0,
        ),
        steps=tuple(
            Step(observation={}, chunk=chunk, rewards=np.zeros(1, np.float32), agent=agent)
            for agent in agents
        ),
        final_observation={},
        stop_reason=StopReason.TERMINATED,
    )


def test_one_policy_acts_for_agents_of_any_name_and_gets_their_episodes_whole() -> None:
    trajectory = make_episode(["solver", "checker"])
    (part,) = ONE.split_by_member([trajectory], SOLE_MEMBER)
    assert part.trajectory is trajectory
    assert part.decisions == (0, 1)
    assert ONE.get_member("whoever") == SOLE_MEMBER
    ONE.require_members([trajectory])


def test_one_policy_leaves_no_name_in_metrics_and_seeds() -> None:
    assert (ONE.get_prefix(SOLE_MEMBER), ONE.derive_seed(7, SOLE_MEMBER)) == ("", 7)
    assert PAIR.get_prefix("solver") == "solver/"
    assert PAIR.derive_seed(7, "solver") == derive_seed(7, "solver")


def test_a_member_gets_the_decisions_of_its_own_agent() -> None:
    (part,) = PAIR.split_by_member([make_episode(["solver", "checker", "solver"])], "solver")
    assert part.decisions == (0, 2)
    assert PAIR.get_member("solver") == "solver"


def test_an_agent_without_a_member_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"agent 'judge' has no policy, .*\['checker', 'solver'\]"
    ):
        PAIR.require_members([make_episode(["solver", "judge"])])
    with pytest.raises(KeyError):
        PAIR.get_member("judge")


def test_a_team_of_one_named_member_acts_for_its_own_agent_only() -> None:
    solver = AgentNames(["solver"])
    assert not solver.acts_for_all
    assert solver.get_prefix("solver") == "solver/"


def test_agent_names_are_equal_in_any_order() -> None:
    assert AgentNames(["checker", "solver"]) == PAIR != ONE
    assert len({AgentNames(["checker", "solver"]), PAIR}) == 1


def test_a_policy_without_a_name_is_a_team_of_one() -> None:
    policy: dict[str, object] = {}
    assert key_by_member(object()).keys() == {SOLE_MEMBER}  # type: ignore[arg-type]
    assert key_by_member(policy) is policy  # type: ignore[arg-type]
