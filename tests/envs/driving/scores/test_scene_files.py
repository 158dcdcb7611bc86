"""Scenes as files of plain arrays."""

from pathlib import Path

import numpy as np
import pytest

from tests.envs.driving.scores.drawn_scenes import draw_scene
from vla_rl.envs.driving.scores import score_waypoints
from vla_rl.envs.driving.scores.scene_files import load_scene, save_scene


def test_a_scene_scores_from_its_file_as_it_scored_before(tmp_path: Path) -> None:
    for seed in range(4):
        scene, waypoints = draw_scene(seed)
        save_scene(tmp_path / "scene.npz", scene)
        read = load_scene(tmp_path / "scene.npz")
        for version in ("pdms_v1", "epdms_v2"):
            before = score_waypoints(scene, waypoints, version)
            after = score_waypoints(read, waypoints, version)
            np.testing.assert_array_equal(before.total, after.total)
            assert before.sub.keys() == after.sub.keys()


def test_files_that_are_no_scenes_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "scene.npz"
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"scene\.npz is no scene file"):
        load_scene(path)
    np.savez(path, format=np.array(7))
    with pytest.raises(ValueError, match="format 7, expected 1"):
        load_scene(path)
    np.savez(path, format=np.array(1))
    with pytest.raises(ValueError, match="lacks start"):
        load_scene(path)
    np.savez(path, format=np.array(1), start=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="no scene file"):
        load_scene(path)


def test_a_scene_without_a_route_is_refused_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "scene.npz"
    save_scene(path, draw_scene(0)[0])
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **{**arrays, "centre_line": arrays["centre_line"][:1]})
    with pytest.raises(ValueError, match=r"scene\.npz: .*without a route"):
        load_scene(path)
