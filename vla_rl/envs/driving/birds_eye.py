"""Drives from above, for people: the images of one episode from its actions."""

from typing import Any, Final

import numpy as np

from vla_rl.envs.driving.closed_loop import ClosedLoopDrivingEnv
from vla_rl.envs.driving.observing import FRONT, Observer
from vla_rl.envs.driving.plan_actions import NUM_WAYPOINTS, decode_plan
from vla_rl.envs.driving.planner import best_proposal
from vla_rl.envs.driving.scores import score_waypoints
from vla_rl.envs.driving.scores.motion import Car
from vla_rl.envs.driving.scores.scene import AX, HEADING, STEER, VX, YAW_RATE, X, Y
from vla_rl.envs.driving.world import draw_world

NUM_IMAGES: Final = 5
"""Pictures of one drive, from its first moment to its last."""

_EGO: Final = (X, Y, HEADING, VX, AX, STEER, YAW_RATE)


def get_layout(kwargs: dict[str, Any], number: int) -> str:
    """Return the layout of a scene of an environment with these keywords."""
    return str(kwargs.get("kind") or draw_world(number, kwargs["split"]).kind)


def draw_plan(kwargs: dict[str, Any], number: int, rows: np.ndarray) -> list[np.ndarray]:
    """Return the motion that a plan is graded by, 0 to 4 s, among the recorded others.

    Args:
        kwargs: keywords of `OpenLoopDrivingEnv`.
        rows: [8, 3], the actions.
    """
    world = draw_world(number, kwargs["split"], kwargs.get("kind"))
    version = kwargs.get("version", "epdms_v2")
    action, speed = kwargs.get("action", "moves"), float(world.start[VX])
    observer = Observer(world, (FRONT,), 32, (0.0, 1.0))
    route = observer.route(Car(*(float(world.start[column]) for column in _EGO)))
    waypoints = decode_plan(rows[:NUM_WAYPOINTS], action, speed, route)
    reference, _ = best_proposal(world, version)
    (states,) = score_waypoints(world.scene(reference), waypoints[None], version).states
    images = []
    for step in np.linspace(0, len(states) - 1, NUM_IMAGES).round().astype(int):
        car = Car(*(float(states[step, column]) for column in _EGO))
        others = world.tracks.poses[:, step]
        images.append(observer.from_above(car, others, states[::5, :2]))
    return images


def draw_drive(kwargs: dict[str, Any], number: int, rows: np.ndarray) -> list[np.ndarray]:
    """Return moments of a closed-loop drive, which is driven once more with the same actions.

    Args:
        kwargs: keywords of `ClosedLoopDrivingEnv` with the actions of a plan.
        rows: [K, 3], all actions of the episode.
    """
    env = ClosedLoopDrivingEnv(**{**kwargs, "image_size": 32, "render_mode": "rgb_array"})
    env.render_every_step = False
    env.reset(options={"init_state_id": number})
    moments = set(np.linspace(0, len(rows) - 1, NUM_IMAGES).round().astype(int).tolist())
    images = []
    for step, row in enumerate(rows):
        if step in moments:
            image = env.render()
            assert image is not None
            images.append(image)
        env.step(row)
    return images
