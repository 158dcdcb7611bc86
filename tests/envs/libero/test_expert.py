"""The scripted expert and what is recorded of it."""

from pathlib import Path

import numpy as np
import pytest

from vla_rl.envs.experts import CorrelatedNoise, record_demonstration
from vla_rl.envs.libero import LiberoEnv, find_task
from vla_rl.envs.libero.assets import find_assets
from vla_rl.envs.libero.experts import Expert, not_from_above, picking
from vla_rl.envs.libero.scene import Scene
from vla_rl.envs.libero.task_files import read_init_states


def test_the_expert_puts_the_cream_cheese_into_the_basket_in_spite_of_noise(
    object_env: LiberoEnv,
) -> None:
    object_env.reset(options={"init_state_id": 7})
    expert, noise = Expert(object_env.scene), CorrelatedNoise(0.25, np.random.default_rng(1))
    object_env.render_every_step = False
    try:
        terminated = truncated = False
        while not (terminated or truncated):
            *_, terminated, truncated, info = object_env.step(noise.perturbed(expert.act()))
    finally:
        object_env.render_every_step = True
    assert terminated
    assert info["is_success"]
    assert 60 < info["num_steps"] < 200


def test_an_expert_without_a_grasp_stands_still_and_says_why(
    object_env: LiberoEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the cream cheese is a box of 36 by 56 by 15 mm
    monkeypatch.setattr(picking, "MAX_WIDTH_M", 0.01)
    object_env.reset(options={"init_state_id": 7})
    expert = Expert(object_env.scene)
    assert expert.obstacle is None
    np.testing.assert_array_equal(expert.act(), [0, 0, 0, 0, 0, 0, -1])
    assert str(expert.obstacle).startswith(
        "cream_cheese_1 cannot be grasped from above as it lies: it is wider than "
    )
    expert.start_over()
    assert expert.obstacle is None


def test_an_expert_says_what_it_cannot_put_under_the_roof_of_a_microwave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = find_task("libero_10", 9)
    scene = Scene(task, find_assets("stand-ins").path, scene_seed=0)
    try:
        scene.start_episode(read_init_states(task.init_states_file)[0])
        # the microwave opens towards -y, its door not counted, and the mug's handle faces that side
        np.testing.assert_allclose(
            not_from_above.find_entry_direction(scene, "microwave_1_heating_region"),
            [0, 1, 0],
            atol=1e-6,
        )
        monkeypatch.setattr(not_from_above, "MAX_WIDTH_M", 0.01)
        expert = Expert(scene)
        expert.act()
        assert str(expert.obstacle).startswith("white_yellow_mug_1 cannot be grasped from the side")
        monkeypatch.setattr(not_from_above, "find_entry_direction", lambda *_: None)
        expert.start_over()
        expert.act()
        assert (
            expert.obstacle == "microwave_1_heating_region has a roof, and is closed on every side"
        )
    finally:
        scene.close()


def test_a_demonstration_holds_what_was_seen_before_each_action_and_the_clean_action(
    object_env: LiberoEnv, tmp_path: Path
) -> None:
    limit, object_env.step_limit = object_env.step_limit, 4
    try:
        demonstration = record_demonstration(object_env, init_state_id=7, noise=0.25, seed=1)
    finally:
        object_env.step_limit = limit
    assert not demonstration.is_success
    start = object_env.reset(options={"init_state_id": 7})[0]
    path = tmp_path / "task" / "0000.npz"
    demonstration.write_npz(path)
    assert [file.name for file in path.parent.iterdir()] == ["0000.npz"]
    with np.load(path, allow_pickle=False) as saved:
        assert saved["image"].shape == saved["wrist_image"].shape == (4, 96, 96, 3)
        np.testing.assert_array_equal(saved["image"][0], start["image"])
        np.testing.assert_array_equal(saved["state"][0], start["state"])
        np.testing.assert_array_equal(saved["action"][0], Expert(object_env.scene).act())
        assert str(saved["instruction"]) == "pick up the cream cheese and place it in the basket"
        difference = np.abs(saved["executed_action"] - saved["action"])
        assert (difference[:, :6].max(axis=1) > 0).all()
        assert difference[:, 6].max() == 0.0


def test_noise_is_correlated_and_smaller_on_rotations() -> None:
    noise = CorrelatedNoise(0.25, np.random.default_rng(0))
    values = np.array([noise.perturbed(np.zeros(7, np.float32)) for _ in range(20000)])
    # n <- 0.7 n + 0.7 * 0.25 * randn has standard deviation 0.175 / sqrt(1 - 0.49) = 0.245, and 0.3
    # of it on rotations
    np.testing.assert_allclose(values[:, :3].std(0), 0.245, rtol=0.05)
    np.testing.assert_allclose(values[:, 3:6].std(0), 0.0735, rtol=0.05)
    assert np.corrcoef(values[1:, 0], values[:-1, 0])[0, 1] == pytest.approx(0.7, abs=0.03)
