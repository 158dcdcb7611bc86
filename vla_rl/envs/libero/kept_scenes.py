"""Scenes that a process keeps: built once, before any OpenGL, and handed to one environment after the other.

A process that forks others prepares its scenes first. Each child then finds them built, in memory that it shares with its
siblings for as long as nobody writes to it, and makes only its cameras itself. Other scenes live and die with their
environment.
"""

from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from vla_rl.envs.libero.init_states import read_init_states
from vla_rl.envs.libero.scene import Scene
from vla_rl.envs.libero.stepping import Physics
from vla_rl.envs.libero.tasks import Task


class SceneKey(NamedTuple):
    """What makes two scenes the same one."""

    task: Task
    assets: Path
    scene_seed: int


_kept: dict[SceneKey, Scene] = {}
_lent: set[SceneKey] = set()


def keep_scene(key: SceneKey) -> None:
    """Build the scene and keep it for the life of this process; again does nothing.

    It takes its first steps here too, so that the compiled code is loaded before a fork.
    """
    if key in _kept:
        return
    scene = Scene(*key)
    scene.begin(read_init_states(key.task.init_states_file)[0])
    for physics in get_args(Physics):
        scene.physics = physics
        scene.advance(np.zeros(7))
    _kept[key] = scene


def take_scene(key: SceneKey) -> Scene:
    """The kept scene, where there is one and nobody has it; else a new one."""
    if key in _kept and key not in _lent:
        _lent.add(key)
        return _kept[key]
    return Scene(*key)


def give_back_scene(key: SceneKey, scene: Scene) -> None:
    """What `take_scene` gave is no longer used: kept ones wait for the next environment, others are freed."""
    if _kept.get(key) is scene:
        _lent.discard(key)
    else:
        scene.close()
