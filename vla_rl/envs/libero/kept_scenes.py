"""Cache of scenes in a process: built once, before any OpenGL, and used by one environment after
the other.

A process that forks others prepares its scenes first. Each child then finds them built, in
copy-on-write memory that it shares with its siblings, and makes only its own cameras. Other scenes
are freed with their environment.
"""

from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from vla_rl.envs.libero.init_states import read_init_states
from vla_rl.envs.libero.scene import Scene
from vla_rl.envs.libero.stepping import Physics
from vla_rl.envs.libero.tasks import Task


class SceneKey(NamedTuple):
    """Arguments that identify a scene."""

    task: Task
    assets: Path
    scene_seed: int


_kept: dict[SceneKey, Scene] = {}
_lent: set[SceneKey] = set()


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


def give_back_scene(key: SceneKey, scene: Scene) -> None:
    """Return a scene from `take_scene`: a kept one waits for the next environment, any other is
    freed.
    """
    if _kept.get(key) is scene:
        _lent.discard(key)
    else:
        scene.close()
