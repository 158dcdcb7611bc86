"""The members of a team, and the decisions that are each one's."""

from collections.abc import Sequence

import numpy as np
import pytest

from vla_rl.errors import ConfigError
from vla_rl.types import (
    SOLE_MEMBER,
    ActionChunk,
    EnvSpec,
    EpisodeSpec,
    Roster,
    Step,
    StopReason,
    Trajectory,
    by_member,
    derive_seed,
)

ONE = Roster([SOLE_MEMBER])
PAIR = Roster(["solver", "checker"])


def episode(agents: Sequence[str]) -> Trajectory:
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
    trajectory = episode(["solver", "checker"])
    (part,) = ONE.parts_of([trajectory], SOLE_MEMBER)
    assert part.trajectory is trajectory
    assert part.decisions == (0, 1)
    assert ONE.member_of("whoever") == SOLE_MEMBER
    ONE.require_all([trajectory])


def test_one_policy_leaves_no_name_in_metrics_and_seeds() -> None:
    assert (ONE.prefix(SOLE_MEMBER), ONE.seed(7, SOLE_MEMBER)) == ("", 7)
    assert PAIR.prefix("solver") == "solver/"
    assert PAIR.seed(7, "solver") == derive_seed(7, "solver")


def test_a_member_gets_the_decisions_of_its_own_agent() -> None:
    (part,) = PAIR.parts_of([episode(["solver", "checker", "solver"])], "solver")
    assert part.decisions == (0, 2)
    assert PAIR.member_of("solver") == "solver"


def test_an_agent_without_a_member_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"agent 'judge' has no policy, .*\['checker', 'solver'\]"
    ):
        PAIR.require_all([episode(["solver", "judge"])])
    with pytest.raises(KeyError):
        PAIR.member_of("judge")


def test_a_team_of_one_named_member_acts_for_its_own_agent_only() -> None:
    solver = Roster(["solver"])
    assert not solver.acts_for_all
    assert solver.prefix("solver") == "solver/"


def test_rosters_are_equal_in_any_order() -> None:
    assert Roster(["checker", "solver"]) == PAIR != ONE
    assert len({Roster(["checker", "solver"]), PAIR}) == 1


def test_a_policy_without_a_name_is_a_team_of_one() -> None:
    policy: dict[str, object] = {}
    assert by_member(object()).keys() == {SOLE_MEMBER}  # type: ignore[arg-type]
    assert by_member(policy) is policy  # type: ignore[arg-type]
