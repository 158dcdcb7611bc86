"""The vector env behaves as gymnasium's own, step by step, and fails loudly.

stable-baselines3 sees through our adapter exactly what its own vector environment shows it.
"""

import functools
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from sample_envs import Scaled, assert_same

from vla_rl.env_workers import ProcessVectorEnv, SimulatorConfig, make_vec
from vla_rl.errors import ActorDied, ActorFrozen, EnvError
from vla_rl.types import EnvSpec, WrapperSpec

if find_spec("stable_baselines3"):
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

    from vla_rl.env_workers.stable_baselines import Sb3VecEnv, make_sb3_vec

needs_sb3 = pytest.mark.skipif(
    not find_spec("stable_baselines3"), reason="stable-baselines3 is in the extra `bench`"
)

NUM_ENVS = 3
ALONE = pytest.param(1, marks=pytest.mark.proof)
"""A process for each environment: in the suite, several share one where both are tested."""

TOY = EnvSpec(id="vla_rl.envs:vla_rl/toy_reach-v0", kwargs={"step_limit": 7})
BLACKJACK = EnvSpec(id="Blackjack-v1")
CART_POLE = EnvSpec(id="CartPole-v1", kwargs={})


@contextmanager
def both(
    spec: EnvSpec,
    mode: AutoresetMode = AutoresetMode.NEXT_STEP,
    copy: bool = True,
    per_process: int = 1,
) -> Iterator[tuple[ProcessVectorEnv, SyncVectorEnv[Any, Any]]]:
    """Ours and gymnasium's, over equal environments."""
    theirs: SyncVectorEnv[Any, Any] = SyncVectorEnv(
        [lambda: gymnasium.make(spec.id, **spec.kwargs) for _ in range(NUM_ENVS)],
        autoreset_mode=mode,
    )
    config = SimulatorConfig(envs_per_process=per_process)
    ours = make_vec(spec, NUM_ENVS, autoreset_mode=mode, copy=copy, config=config)
    try:
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()


def step_alike(ours: VectorEnv, theirs: VectorEnv, num_steps: int) -> int:
    """Run both with equal seeds and actions and compare everything; how many episodes ended."""
    assert_same(ours.reset(seed=42), theirs.reset(seed=42), "reset")
    theirs.action_space.seed(7)
    ended = 0
    for number in range(num_steps):
        actions = theirs.action_space.sample()
        theirs_step = theirs.step(actions)
        assert_same(ours.step(actions), theirs_step, f"step {number}")
        ended += int((theirs_step[2] | theirs_step[3]).sum())
    return ended


@pytest.mark.parametrize(
    ("spec", "mode", "per_process"),
    [  # in the suite each value at least once, in the proofs each pair of values
        (CART_POLE, AutoresetMode.NEXT_STEP, 1),
        (TOY, AutoresetMode.NEXT_STEP, 2),
        (BLACKJACK, AutoresetMode.SAME_STEP, 2),
        pytest.param(CART_POLE, AutoresetMode.SAME_STEP, 2, marks=pytest.mark.proof),
        pytest.param(TOY, AutoresetMode.SAME_STEP, 1, marks=pytest.mark.proof),
        pytest.param(BLACKJACK, AutoresetMode.NEXT_STEP, 1, marks=pytest.mark.proof),
    ],
)
def test_two_hundred_steps_equal_those_of_gymnasiums_sync_vector_env(
    spec: EnvSpec, mode: AutoresetMode, per_process: int
) -> None:
    with both(spec, mode, per_process=per_process) as (ours, theirs):
        assert ours.single_observation_space == theirs.single_observation_space
        assert ours.observation_space == theirs.observation_space
        assert ours.action_space == theirs.action_space
        assert ours.metadata == theirs.metadata
        assert step_alike(ours, theirs, 200) > 10


def test_without_copies_the_values_are_the_same_and_the_arrays_too() -> None:
    with both(TOY, copy=False) as (ours, theirs):
        assert step_alike(ours, theirs, 30) > 0
        first, _ = ours.reset(seed=0)
        second = ours.step(ours.action_space.sample())[0]
        assert first["image"] is second["image"]


def test_with_copies_a_kept_observation_stays_as_it_is() -> None:
    with both(TOY) as (ours, _):
        first, _ = ours.reset(seed=0)
        kept = first["state"].copy()
        ours.step(np.full((NUM_ENVS, 7), 0.5, np.float32))
        assert np.array_equal(first["state"], kept)


@pytest.mark.parametrize("per_process", [ALONE, 2])
def test_a_mask_resets_only_some_environments_as_gymnasium_does(per_process: int) -> None:
    with both(CART_POLE, AutoresetMode.DISABLED, per_process=per_process) as (ours, theirs):
        assert_same(
            ours.reset(seed=[3, None, 5])[0][[0, 2]],
            theirs.reset(seed=[3, None, 5])[0][[0, 2]],
            "reset",
        )
        ours.reset(seed=1)
        theirs.reset(seed=1)
        actions = np.ones(NUM_ENVS, np.int64)
        while not theirs.step(actions)[2].any():
            ours.step(actions)
        ended = ours.step(actions)[2]
        with pytest.raises(gymnasium.error.ResetNeeded, match="are over; reset them first"):
            ours.step(actions)
        mask = {"reset_mask": ended}
        assert_same(
            ours.reset(seed=9, options=dict(mask)),
            theirs.reset(seed=9, options=dict(mask)),
            "partial reset",
        )


def test_images_are_rendered_by_every_environment() -> None:
    spec = EnvSpec(id=TOY.id, kwargs={"render_mode": "rgb_array"})
    with both(spec, per_process=2) as (ours, theirs):
        ours.reset(seed=0)
        theirs.reset(seed=0)
        assert ours.render_mode == "rgb_array"
        assert_same(ours.render(), theirs.render(), "render")


def test_gymnasiums_wrappers_take_it() -> None:
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(make_vec(CART_POLE, 2))
    envs.reset(seed=0)
    infos: dict[str, Any] = {}
    while "episode" not in infos:
        infos = envs.step(np.ones(2, np.int64))[4]
    assert infos["episode"]["l"].max() >= 8
    envs.close()


WRAPPERS = [
    functools.partial(gymnasium.wrappers.TimeLimit, max_episode_steps=6),
    functools.partial(Scaled, factor=0.5),
]


def in_wrappers() -> gymnasium.Env[Any, Any]:
    env: gymnasium.Env[Any, Any] = gymnasium.make("CartPole-v1")
    for wrapper in WRAPPERS:
        env = wrapper(env)
    return env


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("per_process", [ALONE, NUM_ENVS])
def test_wrappers_are_applied_in_the_processes_as_gymnasium_applies_them(
    mode: AutoresetMode, per_process: int
) -> None:
    config = SimulatorConfig(envs_per_process=per_process)
    ours = make_vec("CartPole-v1", NUM_ENVS, wrappers=WRAPPERS, autoreset_mode=mode, config=config)
    theirs: SyncVectorEnv[Any, Any] = SyncVectorEnv([in_wrappers] * NUM_ENVS, autoreset_mode=mode)
    try:
        assert ours.single_observation_space == theirs.single_observation_space
        assert ours.get_attr("factor") == theirs.get_attr("factor") == (0.5,) * NUM_ENVS
        assert step_alike(ours, theirs, 40) > 10
    finally:
        ours.close()
        theirs.close()


def test_a_wrapper_that_another_process_cannot_import_is_refused() -> None:
    with pytest.raises(
        TypeError, match="cannot be found by another process: put it at the top of a module"
    ):
        make_vec(CART_POLE, 1, wrappers=[lambda env: env])
    with pytest.raises(TypeError, match="has positional arguments, expected keywords only"):
        make_vec(CART_POLE, 1, wrappers=[functools.partial(Scaled, 0.5)])
    spec = EnvSpec(id="CartPole-v1", wrappers=(WrapperSpec(path="sample_envs:Scald"),))
    with pytest.raises(EnvError, match=r"the wrapper 'sample_envs:Scald': .* has no class"):
        make_vec(spec, 1)


LAMP = EnvSpec(id="sample_envs:test/Lamp-v0")


@pytest.mark.parametrize("per_process", [ALONE, 2])
def test_attributes_and_methods_are_those_of_gymnasiums_own(per_process: int) -> None:
    with both(LAMP, per_process=per_process) as (ours, theirs):
        for name in ("colour", "size", "names", "action_space", "observation_space", "render_mode"):
            assert ours.get_attr(name) == theirs.get_attr(name), name
        for envs in (ours, theirs):
            envs.set_attr("colour", ["red", "green", "blue"])
        assert ours.call("shine", 2, loud=True) == theirs.call("shine", 2, loud=True)
        assert ours.get_attr("colour") == theirs.get_attr("colour") == ("red", "green", "blue")
        for envs in (ours, theirs):
            envs.set_attr("size", {"w": (1, 2)})
            with pytest.raises(AttributeError, match="glow"):
                envs.call("glow")
            with pytest.raises(ValueError, match="times is -1"):
                envs.call("shine", -1)
            with pytest.raises(ValueError, match=r"2.{1,2}values"):
                envs.set_attr("colour", ["red", "green"])
        assert ours.get_attr("size") == theirs.get_attr("size") == ({"w": (1, 2)},) * NUM_ENVS
        with pytest.raises(TypeError, match="thing is a object, expected numbers, strings"):
            ours.get_attr("thing")
        assert_same(
            ours.reset(seed=0), theirs.reset(seed=0), "the environments are sound after all of this"
        )


def test_arguments_of_the_environment_stand_beside_those_of_its_spec() -> None:
    spec = EnvSpec(id=LAMP.id, kwargs={"colour": "green"})
    envs = make_vec(spec, 2, render_mode="rgb_array")
    assert (envs.render_mode, envs.get_attr("colour")) == ("rgb_array", ("green", "green"))
    envs.close()


@pytest.mark.parametrize("mode", [None, "vector_entry_point"])
def test_gymnasiums_make_vec_makes_ours_of_our_ids(mode: str | None) -> None:
    env_id, options = (
        "vla_rl.envs:vla_rl/toy_reach-v0",
        {"step_limit": 5, "render_mode": "rgb_array"},
    )
    ours = gymnasium.make_vec(env_id, num_envs=NUM_ENVS, vectorization_mode=mode, **options)
    theirs = gymnasium.make_vec(env_id, num_envs=NUM_ENVS, vectorization_mode="sync", **options)
    try:
        assert isinstance(ours, ProcessVectorEnv)
        assert ours.spec is not None
        assert ours.spec.kwargs["step_limit"] == 5
        assert step_alike(ours, theirs, 30) > 0
    finally:
        ours.close()
        theirs.close()


def test_every_id_of_ours_has_a_vector_entry_point_that_is_written_in_its_spec() -> None:
    importlib.import_module("vla_rl.envs")
    ids = [name for name in gymnasium.registry if name.startswith("vla_rl/")]
    assert len(ids) >= 14
    for name in ids:
        assert (
            gymnasium.spec(name).vector_entry_point == f"vla_rl.envs:{name.removeprefix('vla_rl/')}"
        )
        assert f"vla_rl.envs:{name.removeprefix('vla_rl/')}" in gymnasium.spec(name).to_json()


def faulty(fault: str) -> EnvSpec:
    return EnvSpec(id="vla_rl.envs:vla_rl/faulty-v0", kwargs={"fault": fault, "at_step": 2})


@pytest.mark.parametrize(
    ("fault", "error"),
    [("kill", ActorDied), ("stop", ActorFrozen), ("wrong_shape", EnvError), ("raise", EnvError)],
)
@pytest.mark.parametrize("per_process", [ALONE, 2])
def test_a_fault_in_one_environment_is_raised_and_closing_leaves_no_process(
    fault: str, error: type[Exception], per_process: int
) -> None:
    config = SimulatorConfig(
        step_timeout_s=5.0 if fault == "stop" else 60.0, envs_per_process=per_process
    )
    envs = make_vec(faulty(fault), 2, config=config)
    pids = [process.pid for process in envs._rows.processes]
    envs.reset(seed=0)
    still = np.zeros((2, 7), np.float32)
    envs.step(still)
    with pytest.raises(error):
        envs.step(still)
    envs.close()
    envs.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(EnvError, match="could not be made"):
        make_vec("NoSuchEnv-v7", 2)
    with pytest.raises(ValueError, match="num_envs is 0"):
        make_vec(CART_POLE, 0)
    envs = make_vec(CART_POLE, 2)
    with pytest.raises(ValueError, match="seed has 3 entries"):
        envs.reset(seed=[1, 2, 3])
    with pytest.raises(ValueError, match="reset_mask is"):
        envs.reset(options={"reset_mask": [True, False]})
    envs.reset(seed=0)
    with pytest.raises(ValueError, match="action for CartPole-v1 is 2"):
        envs.step(np.array([0, 2]))
    envs.close()
    with pytest.raises(gymnasium.error.ClosedEnvironmentError):
        envs.reset(seed=0)


@needs_sb3
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1"])
@pytest.mark.parametrize("per_process", [1, NUM_ENVS])
def test_two_hundred_steps_equal_those_of_its_own_dummy_vec_env(
    env_id: str, per_process: int
) -> None:
    ours = make_sb3_vec(env_id, NUM_ENVS, config=SimulatorConfig(envs_per_process=per_process))
    theirs = DummyVecEnv([lambda: gymnasium.make(env_id)] * NUM_ENVS)
    try:
        for envs in (ours, theirs):
            envs.seed(5)
        assert_same(ours.reset(), theirs.reset(), "reset")
        theirs.action_space.seed(1)
        num_ended = 0
        for number in range(210):
            actions = np.array([theirs.action_space.sample() for _ in range(NUM_ENVS)])
            of_theirs = theirs.step(actions)
            assert_same(ours.step(actions), of_theirs, f"step {number}")
            num_ended += int(of_theirs[2].sum())
        assert num_ended >= NUM_ENVS
        assert_same(ours.reset_infos, theirs.reset_infos, "infos of the last resets")
    finally:
        ours.close()
        theirs.close()


@needs_sb3
def test_it_asks_and_sets_attributes_and_knows_wrappers() -> None:
    envs = make_sb3_vec("CartPole-v1", NUM_ENVS)
    try:
        envs.set_attr("gravity", 5.0, indices=[0, 2])
        assert envs.get_attr("gravity") == [5.0, 9.8, 5.0]
        assert envs.env_is_wrapped(gymnasium.wrappers.TimeLimit) == [True] * NUM_ENVS
        assert envs.env_is_wrapped(gymnasium.wrappers.ClipReward, indices=1) == [False]
        assert not envs.has_attr("no_such_thing")
    finally:
        envs.close()


@needs_sb3
def test_it_renders_all_environments_into_one_image() -> None:
    envs = make_sb3_vec("vla_rl.envs:vla_rl/toy_reach-v0", NUM_ENVS, render_mode="rgb_array")
    try:
        assert envs.render_mode == "rgb_array"
        envs.reset()
        image: Any = envs.render()
        assert image.shape == (512, 512, 3)  # four tiles of 256 x 256, one of them empty
    finally:
        envs.close()


@needs_sb3
def test_another_mode_of_beginning_episodes_is_refused() -> None:
    envs = make_vec("CartPole-v1", 1)
    with pytest.raises(ValueError, match=r"expected SAME_STEP, .* use make_sb3_vec"):
        Sb3VecEnv(envs)
    envs.close()


@needs_sb3
def test_its_ppo_trains_through_the_adapter() -> None:
    envs = VecMonitor(make_sb3_vec("CartPole-v1", 4, config=SimulatorConfig(envs_per_process=4)))
    try:
        model = PPO("MlpPolicy", envs, n_steps=64, batch_size=64, n_epochs=1, device="cpu", seed=0)
        model.learn(512)
        assert len(model.ep_info_buffer) > 0
    finally:
        envs.close()
