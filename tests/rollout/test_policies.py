"""An agent gets one policy from one engine, and one for each agent from a team's engines."""

import pytest
from rollout_fakes import CountingEngine, source

from vla_rl.rollout import DecisionCounter, EngineTeam, EpisodePolicy
from vla_rl.types import SOLE_MEMBER

EPISODE = source(1).next_group().episodes[0]


async def test_an_engine_is_a_team_of_one_whose_agents_get_the_policy_itself() -> None:
    team = EngineTeam.of(CountingEngine())
    assert list(team.engines) == [SOLE_MEMBER]
    assert EngineTeam.of(team) is team
    assert isinstance(team.policies_of(EPISODE), EpisodePolicy)


async def test_agents_of_a_team_get_a_policy_by_name() -> None:
    team = EngineTeam({"left": CountingEngine()})
    policies = team.policies_of(EPISODE)
    assert isinstance(policies, dict)
    assert list(policies) == ["left"]


def test_a_team_is_as_old_as_its_oldest_engine() -> None:
    left, right = CountingEngine(), CountingEngine()
    right.weight_version = 3
    assert EngineTeam({"left": left, "right": right}).weight_version == 0
    with pytest.raises(ValueError, match="a team has no engine"):
        EngineTeam({})


def test_time_with_several_waiting_decisions_counts_once() -> None:
    gauge = DecisionCounter()
    gauge.enter(1.0)
    gauge.enter(2.0)
    assert gauge.asked_s(2.5) == 1.5
    gauge.leave(3.0)
    gauge.leave(4.0)
    assert (gauge.asked_s(9.0), gauge.num_decisions, gauge.num_waiting) == (3.0, 2, 0)
