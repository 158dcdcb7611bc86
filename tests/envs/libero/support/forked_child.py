"""Prepares a scene without OpenGL, forks, and lets the child run the scene that it finds.

python forked_child.py <init_state_id> <actions.npy> <out.npz>
"""

import os
import sys
from pathlib import Path

import numpy as np

from vla_rl.envs.libero import LiberoEnv

init_state_id, actions_file, out_file = sys.argv[1:]
arguments = {"suite": "libero_object", "task_id": 1, "image_size": 96}
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
    observation, _ = env.reset(options={"init_state_id": int(init_state_id)})
    images, states = [observation["image"]], [observation["state"]]
    for action in np.load(actions_file)[:12]:
        observation = env.step(action)[0]
        images.append(observation["image"])
        states.append(observation["state"])
    scene = env.scene
    env.close()
    is_kept = LiberoEnv(**arguments).scene is scene
    np.savez(out_file, image=np.array(images), state=np.array(states), is_kept=is_kept)
    os._exit(0)
_, status = os.waitpid(child, 0)
print(f"graphics={graphics} num_threads={num_threads} child={os.waitstatus_to_exitcode(status)}")
