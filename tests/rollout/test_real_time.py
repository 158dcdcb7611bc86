"""The agent whose world goes on while the policy decides."""

from typing import Any

import numpy as np
import pytest
from small_episodes import mlp

from vla_rl.cli.policy_source import require_real_time
from vla_rl.errors import AgentError, ConfigError
from vla_rl.rollout import RealTimeConfig, make_real_time_agent
from vla_rl.rollout.agents import check_decisions, check_trajectory
from vla_rl.types import (
    ActionChunk,
    ChunkOutcome,
    EnvSpec,
    EpisodeSpec,
    Observation,
    Sampling,
    Trajectory,
)

NUM_ROWS = 8


class CountingEnv:
    """A world that lasts for 12 control steps; it notes the actions, and shows how many it has seen."""

    def __init__(self) -> None:
        self.episode = EpisodeSpec(
            episode_id=0,
            group_id=0,
            member=0,
            env=EnvSpec(id="none"),
            task="none",
            seed=0,
            policy_seed=0,
        )
        self.actions: list[float] = []

    async def reset(self) -> tuple[Observation, dict[str, Any]]:
        return self._observe(), {}

    async def step_chunk(self, actions: np.ndarray, **_: Any) -> ChunkOutcome:
        self.actions += actions[:, 0].tolist()
        return ChunkOutcome(
            observation=self._observe(),
            rewards=np.zeros(len(actions), np.float32),
            terminated=False,
            truncated=len(self.actions) >= 12,
            info={},
        )

    def _observe(self) -> Observation:
        return {"state": np.array([len(self.actions)], np.float32)}


class NumberedPolicy:
    """Its n-th chunk has the actions 100 n, 100 n + 1, ...; it notes what it was shown."""

    def __init__(self) -> None:
        self.seen: list[Observation] = []

    async def act(self, observation: Observation, sampling: Sampling | None = None) -> ActionChunk:
        self.seen.append(observation)
        actions = 100.0 * len(self.seen) + np.arange(NUM_ROWS, dtype=np.float32)[:, None]
        return ActionChunk(
            actions=actions,
            tokens=actions.reshape(-1),
            log_probs=np.full(NUM_ROWS, -1.0, np.float32),
            weight_version=3,
        )


async def run(**settings: Any) -> tuple[CountingEnv, NumberedPolicy, Trajectory]:
    env, policy = CountingEnv(), NumberedPolicy()
    agent = make_real_time_agent(RealTimeConfig(**settings))
    return env, policy, await agent(env, policy)  # type: ignore[arg-type]


async def test_the_rest_of_the_old_chunk_runs_while_the_policy_decides() -> None:
    env, policy, trajectory = await run(delay=2, executed_rows=4)
    first = [100.0, 101.0, 102.0, 103.0]
    assert env.actions == [*first, 104.0, 105.0, 202.0, 203.0, 204.0, 205.0, 302.0, 303.0]
    assert "planned_actions" not in policy.seen[0]
    # it is asked with what was seen when the delay began, and what is left from then on
    assert policy.seen[1]["state"].tolist() == [4.0]
    assert policy.seen[1]["planned_actions"][:, 0].tolist() == [104.0, 105.0, 106.0, 107.0]
    assert policy.seen[1]["delay"] == 2
    assert [step.chunk.actions[0, 0] for step in trajectory.steps] == [100.0, 104.0, 204.0]


async def test_naive_switching_asks_for_a_chunk_that_is_drawn_anew() -> None:
    env, policy, _ = await run(delay=2, executed_rows=4, continues_plan=False)
    assert env.actions[4:8] == [104.0, 105.0, 202.0, 203.0]
    assert all(set(seen) == {"state"} for seen in policy.seen)


async def test_its_trajectories_pass_the_checks_of_agents() -> None:
    _, _, trajectory = await run(delay=2, executed_rows=4)
    check_trajectory(trajectory, "an episode")
    check_decisions(trajectory, "an episode", lambda agent: None)
    assert all(step.chunk.log_probs.sum() == 0.0 for step in trajectory.steps)
    # what was observed is what a recording shows: the plan is the robot's, not the world's
    assert all(set(step.observation) == {"state"} for step in trajectory.steps)


async def test_half_of_a_chunk_is_executed_by_default() -> None:
    env, _, _ = await run(delay=4)
    assert env.actions == [
        *range(100, 108),
        204.0,
        205.0,
        206.0,
        207.0,
    ]


def test_an_evaluation_refuses_a_plan_that_a_policy_cannot_continue() -> None:
    policy = mlp()
    with pytest.raises(
        ConfigError, match=r"MlpPolicy, which cannot continue .*--real-time.no-continues-plan"
    ):
        require_real_time(policy, "folder", RealTimeConfig(delay=1))
    require_real_time(policy, "folder", RealTimeConfig())
    naive = RealTimeConfig(delay=policy.config.chunk_size, continues_plan=False)
    with pytest.raises(AgentError, match="take longer chunks"):
        require_real_time(policy, "folder", naive)


async def test_a_chunk_that_ends_before_the_decision_is_refused() -> None:
    with pytest.raises(AgentError, match=r"8 rows, expected at least 6 .* and 3 .*--chunk-size"):
        await run(delay=3, executed_rows=6)
    with pytest.raises(ConfigError, match="at least delay, 4"):
        RealTimeConfig(delay=4, executed_rows=3)
