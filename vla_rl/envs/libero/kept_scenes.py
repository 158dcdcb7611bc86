"""Cache of scenes in a process: built once, before any OpenGL, and used by one environment after
the other.

A process that forks others prepares its scenes first. Each child then finds them built, in
copy-on-write memory that it shares with its siblings, and makes only its own cameras. Those of a
kept scene wait for the next environment too, because a simulator of a training run changes between
its tasks every few episodes, and uploading meshes and textures takes as long as drawing thirty
pairs of small images. Other scenes are freed with their environment.
"""

import threading
from pathlib import Path
from typing import Final, NamedTuple, get_args

import numpy as np

from vla_rl.envs.libero.init_states import read_init_states
from vla_rl.envs.libero.scene import Scene
from vla_rl.envs.libero.stepping import Physics
from vla_rl.envs.libero.tasks import Task
from vla_rl.envs.mujoco.cameras import Cameras
from vla_rl.envs.mujoco.look import Quality

_MOST_UPLOADED: Final = 256 * 2**20
"""Bytes of meshes and textures that the waiting cameras of a process may hold: those of some ten
tasks with images of 84 pixels, or of one or two with whole textures of 4096."""


class SceneKey(NamedTuple):
    """Arguments that identify a scene."""

    task: Task
    assets: Path
    scene_seed: int


class Drawing(NamedTuple):
    """Everything that decides whether cameras of a scene can serve another environment of it."""

    cameras: tuple[str, ...]
    size: int
    quality: Quality
    thread: int
    """Id of the thread that made them: OpenGL may refuse another one."""

    @classmethod
    def here(cls, cameras: tuple[str, ...], size: int, quality: Quality) -> "Drawing":
        """Return the key of cameras that this thread uses."""
        return cls(cameras, size, quality, threading.get_ident())


_kept: dict[SceneKey, Scene] = {}
_lent: set[SceneKey] = set()
_waiting: dict[SceneKey, tuple[Drawing, Cameras]] = {}
"""Cameras of kept scenes that no environment uses, the longest waiting first."""


def keep_scene(key: SceneKey) -> Scene:
    """Build the scene and keep it for the life of this process; a second call returns the same.

    The scene also runs its first steps here, so that the compiled code is loaded before a fork.
    """
    if key in _kept:
        return _kept[key]
    scene = Scene(*key)
    scene.begin(read_init_states(key.task.init_states_file)[0])
    for physics in get_args(Physics):
        scene.physics = physics
        scene.advance(np.zeros(7))
    _kept[key] = scene
    return scene


def take_scene(key: SceneKey) -> Scene:
    """Return the kept scene if there is one that is not in use; else build a new one."""
    if key in _kept and key not in _lent:
        _lent.add(key)
        return _kept[key]
    return Scene(*key)


def take_cameras(key: SceneKey, scene: Scene, drawing: Drawing) -> Cameras | None:
    """Return the waiting cameras of this scene if they draw the same; others are closed."""
    if _kept.get(key) is not scene or key not in _waiting:
        return None
    found, cameras = _waiting.pop(key)
    if found != drawing:
        cameras.close()
        return None
    cameras.resume()
    return cameras


def give_back_cameras(key: SceneKey, scene: Scene, drawing: Drawing, cameras: Cameras) -> None:
    """Return the cameras of a scene: those of a kept one wait if there is room, others are closed."""
    if _kept.get(key) is not scene or cameras.is_lost or cameras.num_bytes > _MOST_UPLOADED:
        cameras.close()
        return
    cameras.rest()
    _waiting[key] = drawing, cameras
    while sum(each.num_bytes for _, each in _waiting.values()) > _MOST_UPLOADED:
        _waiting.pop(next(iter(_waiting)))[1].close()


def give_back_scene(key: SceneKey, scene: Scene) -> None:
    """Return a scene from `take_scene`: a kept one waits for the next environment, any other is
    freed.
    """
    if _kept.get(key) is scene:
        _lent.discard(key)
    else:
        scene.close()
