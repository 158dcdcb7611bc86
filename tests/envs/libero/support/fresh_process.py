"""Runs one episode with `LiberoEnv` in a process of its own and says what the process did to its
surroundings.

python fresh_process.py <task_id> <init_state_id> <actions.npy> <out.npz>
"""

import logging
import sys
from pathlib import Path

import gymnasium
import numpy as np

import vla_rl.envs  # noqa: F401  # registers the ids

task_id, init_state_id, actions_file, out_file = sys.argv[1:]
env = gymnasium.make("vla_rl/libero_object-v0", task_id=int(task_id), image_size=96)
observation, info = env.reset(options={"init_state_id": int(init_state_id)})
images, states = [observation["image"]], [observation["state"]]
for action in np.load(actions_file)[:12]:
    observation = env.step(action)[0]
    images.append(observation["image"])
    states.append(observation["state"])
np.savez(
    out_file,
    image=np.array(images),
    state=np.array(states),
    physics=env.unwrapped.get_state()["scene"]["physics"],
)

heavy = [name for name in ("torch", "transformers", "robomimic", "gym") if name in sys.modules]
files = [str(path) for path in Path.home().rglob("*") if path.is_file()]
handlers = [type(handler).__name__ for handler in logging.getLogger("robosuite_logs").handlers]
print(f"heavy={heavy} written_at_home={files} log_handlers={handlers}")
