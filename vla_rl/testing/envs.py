"""Rules that an environment has to keep, as tests to inherit.

    EnvContract           any environment that is trained on
    EmbodiedEnvContract   environments of this package, with images, fixed starts and a step limit

`docs/environments.md` has the same rules in words. What a rule protects: an episode that is run again
after a crash, or on another host, has to be the same episode; a state that was saved has to go on alike;
and a chunk of actions has to end where single steps end, or rewards are paid for steps that never ran.
"""

import asyncio
from collections.abc import Iterator
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorConfig, SimulatorPool, open_env
from vla_rl.env_workers.spaces import as_plain
from vla_rl.envs import run_chunk
from vla_rl.types import EnvSpec, EpisodeSpec

Env = gymnasium.Env[Any, Any]

STEP_LIMIT = 7
"""More than the steps of any test, fewer than the eight after which an open-loop drive ends."""


class EnvContract:
    """Rules of any environment.

    Set `spec`; overwrite `make_env` for one that is not registered (tests in other processes are then
    skipped), and `make_actions` if small random actions would end an episode within six steps.
    """

    spec: ClassVar[EnvSpec | None] = None

    shares_process: ClassVar[bool] = True
    """False for a simulator that needs a process of its own."""

    def make_env(self, **options: Any) -> Env:
        """Make the environment, with further keywords for its constructor."""
        assert self.spec is not None, f"set `spec` in {type(self).__name__}, or write `make_env`"
        kwargs = {**self.spec.kwargs, **options}
        return gymnasium.make(self.spec.id, disable_env_checker=True, **kwargs)

    def make_actions(self, env: Env, num_steps: int) -> np.ndarray:
        """Draw actions that end no episode, one a row."""
        space = env.action_space
        rng = np.random.default_rng(0)
        if not isinstance(space, gymnasium.spaces.Box):
            space.seed(0)
            return np.array([space.sample() for _ in range(num_steps)])
        moves = rng.uniform(-0.1, 0.1, (num_steps, *space.shape))
        return np.clip(moves, space.low, space.high).astype(space.dtype)

    @pytest.fixture(scope="class")
    @classmethod
    def env(cls) -> Iterator[Env]:
        made = cls().make_env()
        yield made
        made.close()

    @pytest.fixture(scope="class")
    @classmethod
    def other_env(cls) -> Iterator[Env]:
        """A second instance in the same process."""
        made = cls().make_env()
        yield made
        made.close()

    def run_steps(self, env: Env, num_steps: int, seed: int) -> list[tuple[Any, ...]]:
        """Run the beginning of an episode; what reset and each step return."""
        outcomes: list[tuple[Any, ...]] = [env.reset(seed=seed)]
        for action in self.make_actions(env, num_steps):
            outcomes.append(env.step(action))
            if outcomes[-1][2] or outcomes[-1][3]:
                break
        return outcomes

    def test_it_passes_gymnasiums_own_checker(self, env: Env) -> None:
        check_env(env.unwrapped)

    def test_every_observation_is_as_its_space_declares(self, env: Env) -> None:
        for outcome in self.run_steps(env, 3, seed=1):
            assert env.observation_space.contains(outcome[0])

    def test_equal_seeds_and_actions_give_equal_episodes(self, env: Env) -> None:
        assert_same(self.run_steps(env, 3, seed=11), self.run_steps(env, 3, seed=11))

    def test_two_instances_run_equal_episodes(self, env: Env, other_env: Env) -> None:
        # chance from anywhere but the seed, or a state that instances share, shows here
        other_env.reset(seed=3)
        assert_same(self.run_steps(env, 3, seed=12), self.run_steps(other_env, 3, seed=12))

    def test_infos_can_be_sent_between_processes(self, env: Env) -> None:
        for outcome in self.run_steps(env, 3, seed=2):
            as_plain(outcome[-1], "info")

    def test_success_is_known_in_every_step_or_in_none(self, env: Env) -> None:
        infos = [outcome[-1] for outcome in self.run_steps(env, 4, seed=2)[1:]]
        assert len({"is_success" in info for info in infos}) == 1
        assert all(isinstance(info.get("is_success", False), bool | np.bool_) for info in infos)

    def test_a_chunk_ends_where_its_single_steps_end(self, env: Env) -> None:
        steps = self.run_steps(env, 4, seed=5)[1:]
        env.reset(seed=5)
        observation, rewards, *ends, info = run_chunk(env, self.make_actions(env, 4))
        last = steps[-1]
        assert_same(observation, last[0])
        assert rewards.tolist() == np.array([step[1] for step in steps], np.float32).tolist()
        assert ends == [*last[2:4]]
        assert_same(info, {**last[4], "num_executed": len(steps)})

    def test_a_state_restored_in_another_instance_goes_on_alike(
        self, env: Env, other_env: Env
    ) -> None:
        own: Any = env.unwrapped
        if not hasattr(own, "get_state"):
            pytest.skip("it has no get_state")
        actions = self.make_actions(env, 6)
        self.run_steps(env, 3, seed=4)
        state = own.get_state()
        stayed = [env.step(action) for action in actions[3:]]
        other_env.reset(seed=99)
        restored = other_env.unwrapped.set_state(state)  # type: ignore[attr-defined]
        assert other_env.observation_space.contains(restored)
        assert_same([other_env.step(action) for action in actions[3:]], stayed)

    def test_it_runs_the_same_episode_in_a_process_of_its_own(self, env: Env) -> None:
        spec = self.require_spec()
        expected_start, _ = env.reset(seed=8)
        expected = run_chunk(env, self.make_actions(env, 4))

        async def run_there() -> tuple[Any, Any]:
            async with (
                asyncio.timeout(100),
                Runtime(name="contract") as runtime,
                open_env(runtime, spec) as handle,
            ):
                start, _ = await handle.reset(seed=8)
                return start, await handle.step_chunk(self.make_actions(env, 4))

        start, outcome = asyncio.run(run_there())
        assert_same(start, expected_start)
        assert_same(outcome.observation, expected[0])
        assert outcome.rewards.tolist() == expected[1].tolist()

    def test_it_runs_the_same_episode_beside_another_in_one_process(self, env: Env) -> None:
        spec = self.require_spec()
        if not self.shares_process:
            pytest.skip("it has a process of its own")
        expected = self.run_steps(env, 4, seed=8)
        actions = self.make_actions(env, 4)[: len(expected) - 1]
        episodes = [
            EpisodeSpec(
                episode_id=i, group_id=i, member=0, env=spec, task="", seed=8 + i, policy_seed=0
            )
            for i in range(2)
        ]
        config = SimulatorConfig(num_envs=2, envs_per_process=2)

        async def run_both() -> list[Any]:
            async with (
                asyncio.timeout(100),
                Runtime(name="contract") as runtime,
                SimulatorPool(runtime, config) as pool,
                pool.lease(episodes[0]) as handle,
                pool.lease(episodes[1]) as extra,
            ):
                outcomes: list[Any] = [(await asyncio.gather(handle.reset(), extra.reset()))[0]]
                for action in actions:
                    both = await asyncio.gather(handle.step(action), extra.step(action))
                    outcomes.append(both[0])
                return outcomes

        (start, _), *steps = asyncio.run(run_both())
        assert_same(start, expected[0][0])
        assert [step[1] for step in steps] == [step[1] for step in expected[1:]]
        assert_same(steps[-1][0], expected[-1][0])

    def require_spec(self) -> EnvSpec:
        """Return the spec, or skip the test."""
        if self.spec is None:
            pytest.skip("other processes make an environment by its `spec`")
        return self.spec


class EmbodiedEnvContract(EnvContract):
    """Rules of an environment of this package.

    Its constructor takes `step_limit`. Its observations have `image`, `state` and `instruction`.
    """

    @pytest.fixture(scope="class")
    @classmethod
    def other_env(cls) -> Iterator[Env]:
        """A second instance, whose episodes are cut off after `STEP_LIMIT` steps."""
        made = cls().make_env(step_limit=STEP_LIMIT)
        yield made
        made.close()

    def test_its_observations_have_an_image_a_state_and_an_instruction(self, env: Env) -> None:
        observation, info = env.reset(seed=0)
        assert observation["image"].dtype == np.uint8
        assert observation["image"].ndim == 3
        assert observation["image"].shape[2] == 3
        assert observation["state"].dtype == np.float32
        assert isinstance(observation["instruction"], str)
        assert observation["instruction"]
        assert info["is_success"] is False
        assert env.unwrapped.render_every_step is True  # type: ignore[attr-defined]

    def test_an_init_state_is_the_same_start_whatever_the_seed(self, env: Env) -> None:
        first, _ = env.reset(seed=1, options={"init_state_id": 7})
        again, _ = env.reset(seed=2, options={"init_state_id": 7})
        different, _ = env.reset(seed=2, options={"init_state_id": 8})
        assert_same(first, again)
        assert not np.array_equal(first["image"], different["image"])

    @pytest.mark.parametrize(
        "options", [{"init_state_id": -1}, {"init_state_id": 1 << 40}, {"no_such_option": 1}]
    )
    def test_unknown_starts_are_refused(self, env: Env, options: dict[str, int]) -> None:
        with pytest.raises(ValueError, match="expected"):
            env.reset(options=options)

    def test_the_time_limit_truncates_and_the_last_image_is_new(self, other_env: Env) -> None:
        actions = self.make_actions(other_env, STEP_LIMIT + 5)
        other_env.reset(seed=6)
        singly = [other_env.step(action) for action in actions[:STEP_LIMIT]]
        assert [step[2] for step in singly] == [False] * STEP_LIMIT
        assert [step[3] for step in singly] == [False] * (STEP_LIMIT - 1) + [True]
        other_env.reset(seed=6)
        observation, rewards, terminated, truncated, _ = run_chunk(other_env, actions)
        assert len(rewards) == STEP_LIMIT
        assert (terminated, truncated) == (False, True)
        assert_same(observation, singly[-1][0])

    def test_a_step_outside_an_episode_is_refused(self, other_env: Env) -> None:
        other_env.reset(seed=0)
        actions = self.make_actions(other_env, STEP_LIMIT + 1)
        for action in actions[:STEP_LIMIT]:
            other_env.step(action)
        with pytest.raises((RuntimeError, gymnasium.error.ResetNeeded), match="reset"):
            other_env.step(actions[STEP_LIMIT])


def assert_same(one: Any, other: Any) -> None:
    """Compare observations, infos, steps, lists of them, to the last bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for part, other_part in zip(one, other, strict=True):
            assert_same(part, other_part)
    else:
        assert np.array_equal(one, other)
