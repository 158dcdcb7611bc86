"""A run trains a team, also if it is given one policy."""

import pytest

from vla_rl.errors import ConfigError
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.team.members import Member, RunEngines, Team
from vla_rl.types import SOLE_MEMBER


def policy() -> MlpPolicy:
    return MlpPolicy.create(
        MlpConfig(state_size=4, action_low=(-1.0,), action_high=(1.0,), num_bins=3), seed=0
    )


class Remote:
    """An engine in a process of its own, as far as its metrics are read."""

    weight_version = 0

    def metrics(self) -> dict[str, float]:
        return {"engine/queued": 2.0}


def test_one_policy_is_a_team_of_one_and_a_team_is_itself() -> None:
    model = policy()
    team = Team.of(model)
    assert {name: member.model for name, member in team.members.items()} == {SOLE_MEMBER: model}
    assert team.roster.acts_for_all
    assert Team.of(team) is team


def test_the_bytes_of_a_team_are_those_of_all_its_members() -> None:
    one = Team.of(policy()).num_bytes
    two = Team({"left": Member(policy()), "right": Member(policy())}).num_bytes
    assert two == (2 * one[0], 2 * one[1])
    assert one[0] > 0


def test_a_team_without_members_is_refused() -> None:
    with pytest.raises(ConfigError, match="the team has no members"):
        Team({})


def test_metrics_of_engines_name_their_member_unless_there_is_one() -> None:
    engines = RunEngines({SOLE_MEMBER: Remote()})  # type: ignore[dict-item]
    assert engines.metrics() == {"engine/queued": 2.0}
    pair = RunEngines({"left": Remote(), "right": Remote()})  # type: ignore[dict-item]
    assert pair.metrics() == {"left/engine/queued": 2.0, "right/engine/queued": 2.0}
