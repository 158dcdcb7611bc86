"""The rules that every registered environment keeps, run against each of them.

LIBERO and Meta-World are tested too if they are installed, LIBERO with the assets that an
environment finds by itself.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorConfig, SimulatorPool, open_env
from vla_rl.envs import LIBERO_SUITES, METAWORLD_SUITES, run_chunk
from vla_rl.envs.libero.assets import find_assets
from vla_rl.envs.metaworld.scene import load_metaworld
from vla_rl.types import EnvSpec, EpisodeSpec

SUPPORT = Path(__file__).parent / "support"


@dataclass(frozen=True)
class Case:
    """One environment, small and quick where it can be."""

    env_id: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    def make(self, **more: Any) -> gymnasium.Env[Any, Any]:
        return gymnasium.make(self.env_id, disable_env_checker=True, **{**self.kwargs, **more})


TOY = Case("vla_rl/toy_reach-v0", {"render_mode": "rgb_array"})
FAULTLESS = Case("vla_rl/faulty-v0", {"fault": "raise", "times": 0, "render_mode": "rgb_array"})
LIBERO = Case(
    "vla_rl/libero_goal-v0",
    {"task_id": 3, "image_size": 64, "quality": "fast", "num_settle_steps": 1},
)
DRIVING = [
    Case(f"vla_rl/driving{way}-v0", {"render_mode": "rgb_array", "image_size": 64})
    for way in ("", "_waypoints", "_control")
]
METAWORLD = Case(
    "vla_rl/metaworld_mt10-v0", {"task_id": "drawer-open", "image_size": 64, "quality": "fast"}
)
CONTROL = Case("vla_rl/control-v0", {"env_id": "Pendulum-v1"})
"""Without an image, so that its own tests hold it to all but the vector modes."""

NEEDING_MORE = {"vla_rl/navsim-v0", "vla_rl/bench2drive-v0"}
"""Environments that need files or a server from outside; their own tests hold them."""

CASES = [TOY, FAULTLESS, *DRIVING, LIBERO, METAWORLD]


@pytest.fixture(params=CASES, ids=lambda case: case.env_id, scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    if request.param is LIBERO:
        try:
            find_assets(None)
        except (FileNotFoundError, ImportError) as error:
            pytest.skip(f"LIBERO cannot run here: {str(error).split('. ')[0]}")
    if request.param is METAWORLD:
        try:
            load_metaworld()
        except ImportError as error:
            pytest.skip(str(error))
    chosen: Case = request.param
    return chosen


@pytest.fixture(scope="module")
def env(case: Case) -> Iterator[gymnasium.Env[Any, Any]]:
    env = case.make()
    yield env
    env.close()


STEP_LIMIT = 7
"""More than the steps of any test here, fewer than the eight after which an open-loop drive ends."""


@pytest.fixture(scope="module")
def other(case: Case) -> Iterator[gymnasium.Env[Any, Any]]:
    """A second instance, whose episodes are cut off after `STEP_LIMIT` steps."""
    env = case.make(step_limit=STEP_LIMIT)
    yield env
    env.close()


def actions_for(env: gymnasium.Env[Any, Any], num_steps: int, seed: int = 0) -> np.ndarray:
    """Small random moves, which end no episode."""
    assert env.action_space.shape is not None
    rng = np.random.default_rng(seed)
    return rng.uniform(-0.1, 0.1, (num_steps, *env.action_space.shape)).astype(np.float32)


def assert_same_observation(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert np.array_equal(value, other[key]), key


def test_it_passes_gymnasiums_own_checker_without_a_warning(env: gymnasium.Env[Any, Any]) -> None:
    check_env(env.unwrapped)


def test_it_speaks_the_words_of_embodied_observations(env: gymnasium.Env[Any, Any]) -> None:
    observation, info = env.reset(seed=0)
    assert observation["image"].dtype == np.uint8
    assert observation["image"].ndim == 3
    assert observation["image"].shape[2] == 3
    assert observation["state"].dtype == np.float32
    assert isinstance(observation["instruction"], str)
    assert observation["instruction"]
    assert info["is_success"] is False
    assert env.unwrapped.render_every_step is True  # type: ignore[attr-defined]


def test_equal_seeds_and_actions_give_equal_episodes(env: gymnasium.Env[Any, Any]) -> None:
    episodes = []
    for _ in range(2):
        observation, _ = env.reset(seed=11)
        episodes.append([observation] + [env.step(row)[0] for row in actions_for(env, 3)])
    for one, other in zip(*episodes, strict=True):
        assert_same_observation(one, other)


def test_an_init_state_is_the_same_start_whatever_the_seed(env: gymnasium.Env[Any, Any]) -> None:
    first, _ = env.reset(seed=1, options={"init_state_id": 7})
    again, _ = env.reset(seed=2, options={"init_state_id": 7})
    other, _ = env.reset(seed=2, options={"init_state_id": 8})
    assert_same_observation(first, again)
    assert not np.array_equal(first["image"], other["image"])


@pytest.mark.parametrize(
    "options", [{"init_state_id": -1}, {"init_state_id": 1 << 40}, {"no_such_option": 1}]
)
def test_unknown_starts_are_refused(env: gymnasium.Env[Any, Any], options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        env.reset(options=options)


def test_a_state_restored_in_another_instance_goes_on_alike(
    env: gymnasium.Env[Any, Any], other: gymnasium.Env[Any, Any]
) -> None:
    rows = actions_for(env, 6)
    env.reset(seed=4)
    for row in rows[:3]:
        env.step(row)
    state = env.unwrapped.get_state()  # type: ignore[attr-defined]
    stayed = [env.step(row) for row in rows[3:]]
    other.reset(seed=99)
    restored = other.unwrapped.set_state(state)  # type: ignore[attr-defined]
    assert other.observation_space.contains(restored)
    moved = [other.step(row) for row in rows[3:]]
    for one, two in zip(stayed, moved, strict=True):
        assert_same_observation(one[0], two[0])
        assert one[1:] == two[1:]


def test_a_chunk_ends_where_its_single_steps_end(env: gymnasium.Env[Any, Any]) -> None:
    rows = actions_for(env, 4)
    env.reset(seed=5)
    steps = [env.step(row) for row in rows]
    env.reset(seed=5)
    observation, rewards, terminated, truncated, info = run_chunk(env, rows)
    assert_same_observation(observation, steps[-1][0])
    assert rewards.tolist() == [step[1] for step in steps]
    assert (terminated, truncated) == steps[-1][2:4]
    assert info == {**steps[-1][4], "num_executed": 4}


def test_the_time_limit_truncates_and_the_last_image_is_new(
    other: gymnasium.Env[Any, Any],
) -> None:
    rows = actions_for(other, STEP_LIMIT + 5)
    other.reset(seed=6)
    singly = [other.step(row) for row in rows[:STEP_LIMIT]]
    assert [step[2] for step in singly] == [False] * STEP_LIMIT
    assert [step[3] for step in singly] == [False] * (STEP_LIMIT - 1) + [True]
    other.reset(seed=6)
    observation, rewards, terminated, truncated, _ = run_chunk(other, rows)
    assert len(rewards) == STEP_LIMIT
    assert (terminated, truncated) == (False, True)
    assert_same_observation(observation, singly[-1][0])


def test_a_step_outside_an_episode_is_refused(other: gymnasium.Env[Any, Any]) -> None:
    other.reset(seed=0)
    rows = actions_for(other, STEP_LIMIT + 1)
    for row in rows[:STEP_LIMIT]:
        other.step(row)
    with pytest.raises((RuntimeError, gymnasium.error.ResetNeeded), match="reset"):
        other.step(rows[STEP_LIMIT])


def test_success_terminates() -> None:
    env = TOY.make()
    env.reset(seed=0)
    terminated = truncated = False
    while not (terminated or truncated):
        _, reward, terminated, truncated, info = env.step(env.unwrapped.optimal_action())  # type: ignore[attr-defined]
    assert (terminated, truncated, reward, info["is_success"]) == (True, False, 1.0, True)


def in_the_suite_unless(*proofs: Case) -> list[Any]:
    return [pytest.param(each, marks=pytest.mark.proof if each in proofs else ()) for each in CASES]


# in the suite, envs/libero/test_env.py compares another process of LIBERO's with this one, and
# test_every_vector_mode_runs_the_same_episodes_none_hangs_and_none_imports_torch does so for Meta-World;
# one of three kinds of action stands for a drive
@pytest.mark.parametrize(
    "case",
    in_the_suite_unless(LIBERO, METAWORLD, *DRIVING[1:]),
    ids=lambda case: case.env_id,
    indirect=True,
)
async def test_it_runs_the_same_episode_in_a_process_of_its_own(
    case: Case, env: gymnasium.Env[Any, Any]
) -> None:
    rows = actions_for(env, 4)
    expected_start, _ = env.reset(seed=8)
    expected, rewards, *_ = run_chunk(env, rows)
    spec = EnvSpec(id=case.env_id, kwargs=case.kwargs)
    async with (
        asyncio.timeout(100),
        Runtime(name="contract") as runtime,
        open_env(runtime, spec) as handle,
    ):
        start, _ = await handle.reset(seed=8)
        outcome = await handle.step_chunk(rows)
        assert_same_observation(start, expected_start)
        assert_same_observation(outcome.observation, expected)
        assert outcome.rewards.tolist() == rewards.tolist()


@pytest.mark.parametrize(
    "case", in_the_suite_unless(*DRIVING[1:]), ids=lambda case: case.env_id, indirect=True
)
async def test_it_runs_the_same_episode_beside_another_in_one_process(
    case: Case, env: gymnasium.Env[Any, Any]
) -> None:
    if case in (LIBERO, METAWORLD):
        pytest.skip("a simulator that draws has a process of its own")
    rows = actions_for(env, 4)
    expected_start, _ = env.reset(seed=8)
    expected, rewards, *_ = run_chunk(env, rows)
    spec = EnvSpec(id=case.env_id, kwargs=case.kwargs)
    episodes = [
        EpisodeSpec(episode_id=i, group_id=i, member=0, env=spec, task="", seed=seed, policy_seed=0)
        for i, seed in enumerate((8, 9))
    ]
    config = SimulatorConfig(num_envs=2, envs_per_process=2)
    async with (
        asyncio.timeout(100),
        Runtime(name="contract") as runtime,
        SimulatorPool(runtime, config) as pool,
        pool.lease(episodes[0]) as handle,
        pool.lease(episodes[1]) as other,
    ):
        (start, _), _ = await asyncio.gather(handle.reset(), other.reset())
        steps = await asyncio.gather(
            *(step for row in rows for step in (handle.step(row), other.step(row)))
        )
    assert_same_observation(start, expected_start)
    assert_same_observation(steps[-2][0], expected)
    assert [step[1] for step in steps[::2]] == rewards.tolist()


# in the suite, Meta-World stands for simulators that draw: LIBERO builds its scene five times; and
# one of three kinds of action for a drive
@pytest.mark.parametrize(
    "case",
    in_the_suite_unless(LIBERO, *DRIVING[1:]),
    ids=lambda case: case.env_id,
    indirect=True,
)
def test_every_vector_mode_runs_the_same_episodes_none_hangs_and_none_imports_torch(
    case: Case,
) -> None:
    kwargs = {**case.kwargs, "assets": "stand-ins"} if case is LIBERO else case.kwargs
    # one, because each Meta-World costs a second in each mode;
    # test_a_state_restored_in_another_instance_goes_on_alike has two that draw in one process, and
    # the proofs of the next test have two in each mode
    assert_equal_in_every_mode(case.env_id, kwargs, "fork", num_envs=1 if case is METAWORLD else 2)


@pytest.mark.parametrize(
    "env_id",
    [
        pytest.param(env_id, marks=() if env_id == CONTROL.env_id else pytest.mark.proof)
        for env_id in sorted(gymnasium.registry)
        if env_id.startswith("vla_rl/") and env_id not in NEEDING_MORE
    ],
)
def test_every_id_runs_the_same_episode_however_its_processes_are_started(env_id: str) -> None:
    assert_equal_in_every_mode(env_id, small(env_id), "fork,spawn,forkserver")


def small(env_id: str) -> dict[str, Any]:
    """The keywords with which an environment of any id is small."""
    suite = {"suite": f"{env_id[7:-3]}_mt10" if "metaworld" in env_id else "libero_goal"}
    named = suite if env_id in ("vla_rl/libero-v0", "vla_rl/metaworld-v0") else {}
    for family, case in (("metaworld", METAWORLD), ("libero", LIBERO)):
        if family in env_id:
            placeholders = {"assets": "stand-ins"} if case is LIBERO else {}
            return {**case.kwargs, **placeholders, **named}
    return next(case.kwargs for case in [*CASES, CONTROL] if case.env_id == env_id)


def assert_equal_in_every_mode(
    env_id: str, kwargs: dict[str, Any], contexts: str, num_envs: int = 2
) -> None:
    command = [
        sys.executable,
        str(SUPPORT / "vector_modes.py"),
        env_id,
        json.dumps(kwargs),
        contexts,
        str(num_envs),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == "torch imported: False"
    modes = dict(line.split() for line in lines)
    assert list(modes) == [*contexts.split(","), "ours", "sync"]
    assert len(set(modes.values())) == 1


def test_importing_the_environments_imports_no_simulator() -> None:
    code = (
        "import sys, gymnasium, vla_rl.envs\n"
        "assert not {'mujoco', 'robosuite', 'libero', 'metaworld', 'torch', 'cv2'} & set(sys.modules), 'a "
        "simulator was imported'\n"
        f"assert all(f'vla_rl/{{suite}}-v0' in gymnasium.registry for suite in {LIBERO_SUITES!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_registered_environment_is_held_to_the_contract() -> None:
    ids = {env_id for env_id in gymnasium.registry if env_id.startswith("vla_rl/")}
    suites = {
        f"vla_rl/{suite}{kind}-v0"
        for suite in (*LIBERO_SUITES, *METAWORLD_SUITES)
        for kind in ("", "-expert")
    }
    # control tasks have no image, so their own tests hold them; an expert's environment is the
    # suite's with one key more
    assert ids == {
        *NEEDING_MORE,
        CONTROL.env_id,
        TOY.env_id,
        FAULTLESS.env_id,
        *(case.env_id for case in DRIVING),
        "vla_rl/libero-v0",
        "vla_rl/metaworld-v0",
        *suites,
    }
