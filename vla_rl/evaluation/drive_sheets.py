"""Contact sheets of drives: a bird's-eye view, one scene of each layout, for each weight version."""

import asyncio
import functools
from pathlib import Path
from typing import Any, Final

import imageio.v3 as imageio
import numpy as np

from vla_rl.envs.driving.closed_loop import ClosedLoopDrivingEnv
from vla_rl.envs.driving.observing import FRONT, Observer
from vla_rl.envs.driving.plan_actions import NUM_WAYPOINTS, decode_plan
from vla_rl.envs.driving.planner import best_proposal
from vla_rl.envs.driving.roads import LAYOUTS
from vla_rl.envs.driving.scores import score_waypoints
from vla_rl.envs.driving.scores.motion import Car
from vla_rl.envs.driving.scores.scene import AX, HEADING, STEER, VX, YAW_RATE, X, Y
from vla_rl.envs.driving.world import draw_world
from vla_rl.evaluation.contact_sheets import drive_sheet_path
from vla_rl.reporting import RunDirectory
from vla_rl.types import Trajectory

MOST_SCENES: Final = 60
"""Held-out scenes among which one of each layout is looked for."""

OPEN_LOOP: Final = "vla_rl/driving-v0"
NUM_IMAGES: Final = 5
"""Images of one drive, from its first moment to its last."""

_EGO: Final = (X, Y, HEADING, VX, AX, STEER, YAW_RATE)


async def write_drive_sheet(run: RunDirectory, weight_version: int, trajectory: Trajectory) -> None:
    """Write the contact sheet of a held-out drive, if its scene is the first one of its layout."""
    kwargs, number = trajectory.episode.env.kwargs, trajectory.episode.options["init_state_id"]
    chosen = await asyncio.to_thread(_chosen_scenes, kwargs["split"], kwargs.get("kind"))
    if number in chosen:
        path = drive_sheet_path(run, chosen[number], number, weight_version)
        await asyncio.to_thread(_write_drive, path, trajectory)


@functools.cache
def _chosen_scenes(split: str, kind: str | None) -> dict[int, str]:
    """Return the layout of each scene that has a contact sheet.

    If the episodes name their layout, they take the layouts in turn, and their first round is
    chosen.
    """
    if kind is not None:
        return dict.fromkeys(range(len(LAYOUTS)), kind)
    first: dict[str, int] = {}
    for number in range(MOST_SCENES):
        first.setdefault(get_layout({"split": split}, number), number)
    return {number: kind for kind, number in first.items()}


def _write_drive(path: Path, trajectory: Trajectory) -> None:
    episode = trajectory.episode
    rows = [step.chunk.actions[: step.num_executed] for step in trajectory.steps]
    actions: np.ndarray[Any, Any] = np.clip(np.concatenate(rows), -1.0, 1.0)
    draw = draw_plan if episode.env.id == OPEN_LOOP else draw_drive
    images = draw(episode.env.kwargs, episode.options["init_state_id"], actions)
    path.parent.mkdir(exist_ok=True)
    padded = [np.pad(each, ((0, 0), (0, 4), (0, 0)), constant_values=255) for each in images]
    imageio.imwrite(path, np.concatenate(padded, axis=1), quality=85)


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
    # the motion that was graded, which the vehicle's controller makes of the plan, and not the plan
    # itself
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
