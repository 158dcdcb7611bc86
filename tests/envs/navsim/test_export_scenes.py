"""Scenes of a navsim install, from its objects over files to episodes."""

import ast
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from driving_stand_ins import EXPORTER, export
from gymnasium.utils.env_checker import check_env

import vla_rl.envs  # noqa: F401  # registers ours
from tests.envs.driving.scores.drawn import draw_scene
from vla_rl.envs.driving.scores import score_waypoints
from vla_rl.envs.driving.scores.navsim import list_recorded, read_recorded


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("navsim")
    done = export(root, {"a": {}, "b": {"command": [0, 0, 1, 0]}, "c": {"synthetic": True}})
    assert done.returncode == 0, done.stderr
    assert "wrote 3 scenes" in done.stdout
    return root / "scenes"


def test_the_exporter_needs_no_more_than_python_3_9_and_nothing_of_ours() -> None:
    tree = ast.parse(EXPORTER.read_text(), feature_version=(3, 9))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any("vla_rl" in ast.unparse(node) for node in imports)


def test_an_exported_scene_scores_as_the_one_in_the_metric_cache(scenes: Path) -> None:
    for number, path in enumerate(list_recorded(scenes)):
        expected, waypoints = draw_scene(number)
        recorded = read_recorded(path)
        assert recorded.is_synthetic == (recorded.token == "c")
        # version 2's caches end at 4 s, which version 2's time to collision does not pass
        before = score_waypoints(expected, waypoints, "epdms_v2")
        after = score_waypoints(recorded.scene, waypoints, "epdms_v2")
        for name, values in before.sub.items():
            np.testing.assert_allclose(after.sub[name], values, atol=1e-12, err_msg=name)
        np.testing.assert_allclose(after.total, before.total, atol=1e-12)


def test_a_recorded_scene_is_an_environment_of_one_decision(scenes: Path) -> None:
    env = gymnasium.make("vla_rl/navsim-v0", folder=str(scenes), image_size=32)
    check_env(env.unwrapped, skip_render_check=True)
    observation, _ = env.reset(options={"init_state_id": 1})
    assert observation["instruction"] == "turn right"
    assert observation["image"].mean() == 20
    assert observation["state"][6:].tolist() == [0, 0, 1, 0]
    for _ in range(8):
        last, reward, terminated, _, info = env.step(np.zeros(3, np.float32))
    assert terminated
    np.testing.assert_array_equal(last["state"], observation["state"])  # no camera was farther on
    assert reward == info["score"]["total"]
    weighted = gymnasium.make(
        "vla_rl/navsim-v0", folder=str(scenes), reward="ego_progress=2,lane_keeping=0.5"
    )
    weighted.reset(options={"init_state_id": 1})
    for _ in range(8):
        _, reward, _, _, info = weighted.step(np.zeros(3, np.float32))
    score = info["score"]
    assert reward == 2 * score["ego_progress"] + 0.5 * score["lane_keeping"]


def test_scenes_that_cannot_be_written_are_left_out_by_name(tmp_path: Path) -> None:
    done = export(
        tmp_path, {"good": {}, "lost": {"no_route": True}, "bad": {"crossing_polygon": True}}
    )
    assert done.returncode == 0
    assert "wrote 1 scenes" in done.stdout
    assert "left out lost: it has no route" in done.stderr
    assert "left out bad: polygon polygon0 of its map crosses itself" in done.stderr


def test_a_folder_without_scenes_and_a_camera_without_images_are_named(
    scenes: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="has no scene files"):
        gymnasium.make("vla_rl/navsim-v0", folder=str(tmp_path))
    env = gymnasium.make("vla_rl/navsim-v0", folder=str(scenes), cameras=("cam_f0", "cam_l0"))
    with pytest.raises(ValueError, match="scene a has no image of cam_l0, only of cam_f0"):
        env.reset(options={"init_state_id": 0})


def test_a_plain_scene_is_not_taken_for_a_recorded_one(scenes: Path, tmp_path: Path) -> None:
    with np.load(scenes / "a.npz") as file:
        arrays = {name: file[name] for name in file.files if name != "token"}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=r"a\.npz lacks token"):
        read_recorded(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", **{**arrays, "token": "a", "command": np.zeros(3)})
    with pytest.raises(ValueError, match="the command has shape"):
        read_recorded(tmp_path / "a.npz")


def test_broken_scenes_are_named_with_their_file(scenes: Path, tmp_path: Path) -> None:
    with np.load(scenes / "a.npz") as file:
        arrays = dict(file)
    corners = arrays["corners"].copy()
    corners[[1, 2]] = corners[[2, 1]]  # the first polygon becomes a bow tie
    gap = np.where(arrays["track_seen"][..., None], np.nan, arrays["track_poses"])
    for name, value, what in (
        ("corners", corners, "crosses itself"),
        ("track_poses", gap, "a track has a pose that is not finite"),
        ("centre_line", arrays["centre_line"][:1], "without a route"),
        ("human", np.full((8, 3), np.nan), r"human has shape \(8, 3\), expected .* finite"),
        ("token", np.array(7), "token holds int64, expected text"),
        ("layers", arrays["layers"].astype("S"), r"layers holds \|S\d+, expected text"),
    ):
        np.savez(tmp_path / "a.npz", **{**arrays, name: value})
        with pytest.raises(ValueError, match=rf"a\.npz: .*{what}"):
            read_recorded(tmp_path / "a.npz")
