"""Runs LIBERO's own environment, as its published evaluation does, and writes what it saw and
computed to a file.

    python robosuite_reference.py <runs.json> <out.npz>

Each run has a `name`, `suite`, `task_id`, `init_state_id`, `assets` (a folder), `actions` (a file)
and `has_images`; at most one may have images, since two environments that draw in one process would
disturb each other's images. Of a run `p` the file holds `p_physics`, MuJoCo's whole state after
each control step (and before the first), and `p_state`, robosuite's own readings; with images also
`p_image` and `p_wrist_image`, turned as the policies see them. A run may have a `next_trial`: the
same actions from that initial state follow in the same environment, without another seed, and the
last state of it is `p_next_physics`.

All of it is robosuite's own code, except that an image that is not stored is not drawn, that a
simulation without images has no render context, which takes seconds to fill, and that MuJoCo
builds each model once.
"""

import copy
import functools
import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mujoco
import numpy as np

from vla_rl.envs.libero.loading import load_libero, load_simulator
from vla_rl.envs.libero.stepping import axis_angle
from vla_rl.envs.libero.task_files import read_init_states
from vla_rl.envs.libero.tasks import find_task
from vla_rl.envs.mujoco.loading import choose_graphics


class Drawing:
    """What robosuite draws; all other images are black."""

    has_context = False
    """Give a simulation that is reset now a render context."""

    is_on = False
    """Draw the cameras' images now."""


def let_robosuite_draw() -> None:
    """Our loader keeps robosuite from OpenGL.

    Give it the context that it would have taken by itself, if `Drawing` says so.
    """
    load_simulator()
    backend = choose_graphics()
    context = importlib.import_module(f"robosuite.renderers.context.{backend}_context")
    name = {"egl": "EGLGLContext", "osmesa": "OSMesaGLContext"}[backend]
    binding: Any = importlib.import_module("robosuite.utils.binding_utils")
    binding.GLContext = getattr(context, name)
    base: Any = importlib.import_module("robosuite.environments.base")
    make_context, render = base.MjRenderContextOffscreen, binding.MjSim.render

    def make_context_if_needed(sim: Any, device_id: int) -> None:
        if Drawing.has_context:
            make_context(sim, device_id=device_id)
        else:
            sim.forward()  # a context does, which moves the solver's warm start
            sim._render_context_offscreen = SimpleNamespace(vopt=mujoco.MjvOption())

    def render_if_needed(sim: Any, width: int, height: int, **others: Any) -> Any:
        if Drawing.is_on:
            return render(sim, width=width, height=height, **others)
        return np.zeros((height, width, 3), np.uint8)

    base.MjRenderContextOffscreen, binding.MjSim.render = make_context_if_needed, render_if_needed


def let_mujoco_build_each_model_once() -> None:
    """robosuite has the same model built at each reset: give it a copy of the built one."""
    binding: Any = importlib.import_module("robosuite.utils.binding_utils")
    build = functools.cache(mujoco.MjModel.from_xml_string)
    binding.MjSim.from_xml_string = lambda xml: binding.MjSim(copy.copy(build(xml)))


def whole_state(env: Any) -> np.ndarray:
    model, data, every = (
        env.sim.model._model,
        env.sim.data._data,
        mujoco.mjtState.mjSTATE_INTEGRATION,
    )
    state = np.empty(mujoco.mj_stateSize(model, every))
    mujoco.mj_getState(model, data, state, every)
    return state


def run_reference(spec: dict[str, Any]) -> dict[str, np.ndarray]:
    task = find_task(spec["suite"], spec["task_id"])
    code = load_libero(task.package)
    code.use_assets(Path(spec["assets"]))
    cameras = {"use_camera_obs": spec["has_images"]}
    env = code.wrapper.OffScreenRenderEnv(
        bddl_file_name=str(task.goal_file.with_name(f"{task.name}.bddl")),
        camera_heights=96,
        camera_widths=96,
        has_offscreen_renderer=True,
        **cameras,
    )
    env.seed(0)
    init_states = read_init_states(task.init_states_file)
    Drawing.has_context = spec["has_images"]
    env.env.reset()
    Drawing.has_context = False
    env.set_init_state(init_states[spec["init_state_id"]])
    for number in range(10):
        Drawing.is_on = spec["has_images"] and number == 9
        observation, _, is_done, _ = env.step([0, 0, 0, 0, 0, 0, -1])
    observations, states, successes = [observation], [whole_state(env)], [is_done]
    for action in np.load(spec["actions"]):
        observation, _, is_done, _ = env.step(action.tolist())
        observations.append(observation)
        states.append(whole_state(env))
        successes.append(is_done)
    seen = {
        "physics": np.array(states),
        "is_success": np.array(successes),
        "state": np.array(
            [
                np.concatenate(
                    [
                        o["robot0_eef_pos"],
                        axis_angle(o["robot0_eef_quat"]),
                        o["robot0_gripper_qpos"],
                    ]
                ).astype(np.float32)
                for o in observations
            ]
        ),
    }
    if spec["has_images"]:
        seen["image"] = np.array([o["agentview_image"][::-1, ::-1] for o in observations])
        seen["wrist_image"] = np.array(
            [o["robot0_eye_in_hand_image"][::-1, ::-1] for o in observations]
        )
    Drawing.is_on = False
    if "next_trial" in spec:
        env.env.reset()
        env.set_init_state(init_states[spec["next_trial"]])
        for action in [[0, 0, 0, 0, 0, 0, -1]] * 10 + np.load(spec["actions"]).tolist():
            env.step(action)
        seen["next_physics"] = whole_state(env)
    return {f"{spec['name']}_{key}": value for key, value in seen.items()}


runs = json.loads(Path(sys.argv[1]).read_text())
let_robosuite_draw()
let_mujoco_build_each_model_once()
np.savez(sys.argv[2], **{key: value for spec in runs for key, value in run_reference(spec).items()})
os._exit(0)  # robosuite's own render context prints tracebacks where it is freed
