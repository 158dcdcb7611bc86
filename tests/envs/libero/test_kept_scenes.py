"""A kept scene serves one environment at a time; any other is built and freed with its environment."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.envs.libero import kept_scenes
from vla_rl.envs.libero.kept_scenes import SceneKey, give_back_scene, keep_scene, take_scene


class Scene:
    """Notes what is asked of it, which takes no simulator."""

    def __init__(self, *key: object) -> None:
        self.begun, self.advanced_by, self.is_closed = 0, list[str](), False
        self.physics = ""

    def begin(self, state: object) -> None:
        self.begun += 1

    def advance(self, action: np.ndarray) -> None:
        self.advanced_by.append(self.physics)

    def close(self) -> None:
        self.is_closed = True


class Task:
    """All that is read of a task."""

    init_states_file = Path("states")


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> SceneKey:
    monkeypatch.setattr(kept_scenes, "Scene", Scene)
    monkeypatch.setattr(kept_scenes, "read_init_states", lambda file: [None])
    monkeypatch.setattr(kept_scenes, "_kept", {})
    monkeypatch.setattr(kept_scenes, "_lent", set())
    task: Any = Task()
    return SceneKey(task, Path("assets"), scene_seed=0)


def test_a_scene_is_kept_once_and_has_run_a_step_of_each_physics(key: SceneKey) -> None:
    scene: Any = keep_scene(key)
    assert keep_scene(key) is scene
    assert (scene.begun, scene.advanced_by) == (1, ["exact", "fast"])


def test_a_kept_scene_is_lent_to_one_environment_at_a_time(key: SceneKey) -> None:
    kept = keep_scene(key)
    assert take_scene(key) is kept
    other: Any = take_scene(key)
    assert other is not kept
    give_back_scene(key, other)
    assert other.is_closed
    give_back_scene(key, kept)
    assert take_scene(key) is kept


def test_a_scene_that_nobody_kept_is_freed_with_its_environment(key: SceneKey) -> None:
    scene: Any = take_scene(key)
    give_back_scene(key, scene)
    assert scene.is_closed
