"""Plays with LIBERO's own environment, as its published evaluation does, and writes what it saw to a file.

    python robosuite_reference.py <init_state_id> <actions.npy> <out.npz>

libero_goal task 7 with its pictures for the first 12 actions, then libero_object task 1 without for all of them: two
environments that draw in one process would disturb each other's pictures.
"""

import os
import sys
from typing import Any

import numpy as np

from vla_rl.envs.libero.assets import find_assets
from vla_rl.envs.libero.init_states import read_init_states
from vla_rl.envs.libero.simulator import load_simulator
from vla_rl.envs.libero.tasks import find_task

load_simulator().libero._assets_path_cache = str(find_assets())

from libero.libero.envs import OffScreenRenderEnv  # noqa: E402  # after the simulator was loaded quietly


def play(suite: str, task_id: int, init_state_id: int, actions: np.ndarray, **cameras: Any) -> tuple[Any, list[Any]]:
    """The environment at the end, and an observation before each action and after the last."""
    task = find_task(suite, task_id)
    env = OffScreenRenderEnv(bddl_file_name=str(task.goal_file), camera_heights=96, camera_widths=96, **cameras)
    env.seed(0)
    env.env.reset()
    env.set_init_state(read_init_states(task.init_states_file)[init_state_id])
    settling = [env.step([0, 0, 0, 0, 0, 0, -1])[0] for _ in range(10)]
    return env, settling[-1:] + [env.step(action.tolist())[0] for action in actions]


init_state_id, actions_file, out_file = int(sys.argv[1]), sys.argv[2], sys.argv[3]
all_actions = np.load(actions_file)
goal_env, seen = play("libero_goal", 7, init_state_id, all_actions[:12])
object_env, _ = play("libero_object", 1, init_state_id, all_actions, use_camera_obs=False)
np.savez(
    out_file,
    image=np.array([o["agentview_image"][::-1, ::-1] for o in seen]),
    wrist_image=np.array([o["robot0_eye_in_hand_image"][::-1, ::-1] for o in seen]),
    eef_pos=np.array([o["robot0_eef_pos"] for o in seen]),
    eef_quat=np.array([o["robot0_eef_quat"] for o in seen]),
    gripper_qpos=np.array([o["robot0_gripper_qpos"] for o in seen]),
    goal_physics=goal_env.get_sim_state(),
    object_physics=object_env.get_sim_state(),
)
os._exit(0)  # robosuite's own render context prints tracebacks where it is freed
