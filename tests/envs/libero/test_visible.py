"""What a camera cannot see is left out, and the picture is the same with it."""

import numpy as np
import pytest

from vla_rl.envs.libero import LiberoEnv
from vla_rl.envs.libero.env import CAMERAS, DRAWN_GROUPS
from vla_rl.envs.libero.loading import load_simulator
from vla_rl.envs.mujoco.cameras import VisibleGeoms


@pytest.mark.parametrize("init_state_id", [0, pytest.param(7, marks=pytest.mark.proof)])
def test_pictures_are_the_same_with_everything_drawn(
    goal_env: LiberoEnv, monkeypatch: pytest.MonkeyPatch, init_state_id: int
) -> None:
    # a table, a cabinet, and a stove whose top mirrors
    observation, _ = goal_env.reset(options={"init_state_id": init_state_id})
    for action in np.random.default_rng(init_state_id).uniform(-1, 1, (6, 7)).astype(np.float32):
        observation = goal_env.step(action)[0]
    model = goal_env.scene.model
    monkeypatch.setattr(VisibleGeoms, "visible_geoms", lambda *_: np.ones(model.ngeom, bool))
    everything = goal_env._cameras.draw(goal_env.scene.reading.drawn, tuple(CAMERAS.values()))
    np.testing.assert_array_equal(everything, [observation[name] for name in CAMERAS])


def test_the_camera_in_the_hand_sees_the_fingers_and_neither_the_mount_nor_the_shoulder(
    object_env: LiberoEnv,
) -> None:
    object_env.reset(options={"init_state_id": 0})
    mujoco, model = load_simulator().mujoco, object_env.scene.model
    camera = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, CAMERAS["wrist_image"])
    seen = VisibleGeoms(model, DRAWN_GROUPS).visible_geoms(camera, object_env.scene.reading.drawn)
    bodies = {model.body(model.geom_bodyid[geom]).name for geom in np.flatnonzero(seen)}
    assert {"gripper0_leftfinger", "gripper0_rightfinger"} <= bodies
    assert not {"mount0_base", "robot0_link0", "robot0_link1", "robot0_link2"} & bodies


def test_the_box_of_each_mesh_holds_its_corners(goal_env: LiberoEnv) -> None:
    model = goal_env.scene.model
    meshes = np.flatnonzero(model.geom_type == load_simulator().mujoco.mjtGeom.mjGEOM_MESH)
    for geom in meshes:
        mesh = model.geom_dataid[geom]
        first = model.mesh_vertadr[mesh]
        corners = model.mesh_vert[first : first + model.mesh_vertnum[mesh]]
        assert (
            np.abs(corners - model.geom_aabb[geom, :3]) <= model.geom_aabb[geom, 3:] + 1e-5
        ).all()
    assert len(meshes) > 50
