"""Runs an episode with `LiberoEnv` in a process of its own: a fresh one, or a fork that finds the scene.

    python own_process.py fresh <task_id> <init_state_id> <actions.npy> <out.npz>
    python own_process.py forked <init_state_id> <actions.npy> <out.npz>

A fresh process says what it did to its surroundings. The other prepares the scene without OpenGL,
forks, and lets the child run the scene that it finds.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import vla_rl.envs  # noqa: F401  # registers the ids


def run_episode(env: Any, init_state_id: str, actions_file: str) -> dict[str, np.ndarray]:
    """Its images and states."""
    observation, _ = env.reset(options={"init_state_id": int(init_state_id)})
    images, states = [observation["image"]], [observation["state"]]
    for action in np.load(actions_file)[:12]:
        observation = env.step(action)[0]
        images.append(observation["image"])
        states.append(observation["state"])
    return {"image": np.array(images), "state": np.array(states)}


def fresh(task_id: str, init_state_id: str, actions_file: str, out_file: str) -> None:
    env: Any = gymnasium.make("vla_rl/libero_object-v0", task_id=int(task_id), image_size=96)
    seen = run_episode(env, init_state_id, actions_file)
    np.savez(out_file, **seen, physics=env.unwrapped.get_state()["scene"]["physics"])
    heavy = [name for name in ("torch", "transformers", "robomimic", "gym") if name in sys.modules]
    files = [str(path) for path in Path.home().rglob("*") if path.is_file()]
    handlers = [type(handler).__name__ for handler in logging.getLogger("robosuite_logs").handlers]
    print(f"heavy={heavy} written_at_home={files} log_handlers={handlers}")


def forked(init_state_id: str, actions_file: str, out_file: str) -> None:
    from vla_rl.envs.libero import LiberoEnv

    arguments: dict[str, Any] = {"suite": "libero_object", "task_id": 1, "image_size": 96}
    LiberoEnv.prepare(**arguments)
    graphics = [
        name
        for name in ("libEGL", "libOSMesa", "libGL.", "_dri.so")
        if name in Path("/proc/self/maps").read_text()
    ]
    num_threads = len(os.listdir("/proc/self/task"))
    child = os.fork()
    if child == 0:
        env = LiberoEnv(**arguments)
        seen = run_episode(env, init_state_id, actions_file)
        scene = env.scene
        env.close()
        is_kept = LiberoEnv(**arguments).scene is scene
        np.savez(out_file, **seen, is_kept=is_kept)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(
        f"graphics={graphics} num_threads={num_threads} child={os.waitstatus_to_exitcode(status)}"
    )


if __name__ == "__main__":
    {"fresh": fresh, "forked": forked}[sys.argv[1]](*sys.argv[2:])
