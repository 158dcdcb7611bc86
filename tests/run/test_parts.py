"""The parts of a run: the policy that a pipeline may look at, its critic, the groups it keeps."""

from pathlib import Path

from toy_runs import small_run

from vla_rl.pipelines.config import FilterConfig
from vla_rl.recipes.srpo_toy import policy_of, starts_of
from vla_rl.rollout import embodied_agent
from vla_rl.run.parts import TrainingParts, group_filter
from vla_rl.team.members import Member, Team


def parts_of(team: Team, root: Path) -> TrainingParts:
    config = small_run(root)
    return TrainingParts(config, starts_of(config), team, agent=embodied_agent)


def test_the_only_policy_is_that_of_the_run_under_any_name(tmp_path: Path) -> None:
    policy = policy_of(small_run(tmp_path))
    assert parts_of(Team.of(policy), tmp_path).model is policy
    assert parts_of(Team({"robot": Member(policy)}), tmp_path).model is policy


def test_a_critic_exists_once_a_pipeline_asks_for_it(tmp_path: Path) -> None:
    parts = parts_of(Team.of(policy_of(small_run(tmp_path))), tmp_path)
    assert not parts.has_critic
    assert parts.critic is parts.critic
    assert parts.has_critic


def test_without_a_filter_no_group_is_looked_at() -> None:
    assert group_filter(FilterConfig()) is None
    assert group_filter(FilterConfig(drop_equal="return")) is not None
