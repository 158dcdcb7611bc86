"""A kept scene serves one environment at a time; any other is built and freed with its environment."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.envs.libero import scene
from vla_rl.envs.libero.scene import (
    CameraKey,
    SceneKey,
    prepare_scene,
    release_cameras,
    release_scene,
    take_cameras,
    take_scene,
)


class Scene:
    """Notes what is asked of it, which takes no simulator."""

    def __init__(self, *key: object) -> None:
        self.begun, self.advanced_by, self.is_closed = 0, list[str](), False
        self.physics = ""

    def start_episode(self, state: object) -> None:
        self.begun += 1

    def run_control_step(self, action: np.ndarray) -> None:
        self.advanced_by.append(self.physics)

    def close(self) -> None:
        self.is_closed = True


class Task:
    """All that is read of a task."""

    init_states_file = Path("states")


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> SceneKey:
    monkeypatch.setattr(scene, "Scene", Scene)
    monkeypatch.setattr(scene, "read_init_states", lambda file: [None])
    monkeypatch.setattr(scene, "_prepared", {})
    monkeypatch.setattr(scene, "_in_use", set())
    monkeypatch.setattr(scene, "_spare_cameras", {})
    task: Any = Task()
    return SceneKey(task, Path("assets"), scene_seed=0)


def test_a_scene_is_kept_once_and_has_run_a_step_of_each_physics(key: SceneKey) -> None:
    scene: Any = prepare_scene(key)
    assert prepare_scene(key) is scene
    assert (scene.begun, scene.advanced_by) == (1, ["exact", "fast"])


def test_a_kept_scene_is_lent_to_one_environment_at_a_time(key: SceneKey) -> None:
    kept = prepare_scene(key)
    assert take_scene(key) is kept
    other: Any = take_scene(key)
    assert other is not kept
    release_scene(key, other)
    assert other.is_closed
    release_scene(key, kept)
    assert take_scene(key) is kept


class Cameras:
    """Notes what is asked of it, which takes no OpenGL."""

    def __init__(self, num_bytes: int, is_lost: bool = False) -> None:
        self.num_bytes, self.is_lost, self.asked = num_bytes, is_lost, list[str]()

    def suspend_look(self) -> None:
        self.asked.append("rest")

    def resume_look(self) -> None:
        self.asked.append("resume")

    def close(self) -> None:
        self.asked.append("close")


SMALL = CameraKey(("agentview",), 84, "fast", thread=1)


def test_waiting_cameras_serve_only_what_they_draw_and_their_thread(key: SceneKey) -> None:
    scene = prepare_scene(key)
    for other in (
        SMALL._replace(size=96),
        SMALL._replace(quality="exact"),
        SMALL._replace(thread=2),
    ):
        cameras: Any = Cameras(1)
        release_cameras(key, scene, SMALL, cameras)
        assert take_cameras(key, scene, other) is None
        assert cameras.asked == ["rest", "close"]
    again: Any = Cameras(1)
    release_cameras(key, scene, SMALL, again)
    assert take_cameras(key, scene, SMALL) is again
    assert again.asked == ["rest", "resume"]
    assert take_cameras(key, scene, SMALL) is None


def test_cameras_that_were_lost_or_are_of_another_scene_are_closed(key: SceneKey) -> None:
    scene, other = prepare_scene(key), take_scene(key)
    lost: Any = Cameras(1, is_lost=True)
    release_cameras(key, scene, SMALL, lost)
    unkept: Any = Cameras(1)
    release_cameras(key, take_scene(key), SMALL, unkept)
    assert other is scene
    assert (lost.asked, unkept.asked) == (["close"], ["close"])


def test_the_longest_waiting_cameras_are_closed_if_there_is_no_room(key: SceneKey) -> None:
    keys = [key._replace(scene_seed=seed) for seed in range(4)]
    waiting: list[Any] = [Cameras(100 * 2**20) for _ in keys]
    for each, cameras in zip(keys, waiting, strict=True):
        release_cameras(each, prepare_scene(each), SMALL, cameras)
    assert [cameras.asked for cameras in waiting] == [
        ["rest", "close"],
        ["rest", "close"],
        ["rest"],
        ["rest"],
    ]
    huge: Any = Cameras(300 * 2**20)
    release_cameras(key, prepare_scene(key), SMALL, huge)
    assert huge.asked == ["close"]


def test_a_scene_that_nobody_kept_is_freed_with_its_environment(key: SceneKey) -> None:
    scene: Any = take_scene(key)
    release_scene(key, scene)
    assert scene.is_closed
