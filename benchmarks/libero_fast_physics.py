"""The error of fast physics against exact physics:
`python -m benchmarks.libero_fast_physics --assets /data/libero/assets`.

Scripted episodes (tasks 1, 4 and 7 of three suites, three initial states each) run in exact
physics, and their actions are replayed in fast physics, in this process, without images. Prints a
row an episode: the control steps until success in each, and the largest difference of any joint or
object coordinate (m or rad) at any step.

Keys of the last line:
    same_step        share of the episodes whose success fell on the same control step, or that
                     failed in both
    middle, worst    largest difference of an episode (m or rad): the median over the episodes, and
                     the greatest
    episodes
"""

import argparse
import statistics
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.interleaved import print_json_line
from benchmarks.libero_experts import NUM_SETTLE_STEPS
from vla_rl.envs.libero.assets import find_assets
from vla_rl.envs.libero.env import IDLE_ACTION
from vla_rl.envs.libero.experts import Expert
from vla_rl.envs.libero.scene import Scene
from vla_rl.envs.libero.task_files import read_init_states
from vla_rl.envs.libero.tasks import STEP_LIMITS, Task, find_task

SUITES, TASK_IDS, INIT_STATE_IDS = (
    ("libero_object", "libero_spatial", "libero_goal"),
    (1, 4, 7),
    (0, 1, 2),
)


class Episode(NamedTuple):
    """The actions of an episode, and all coordinates after each."""

    actions: list[np.ndarray]
    coordinates: list[np.ndarray]
    """float64 [nq] after each control step."""

    num_steps: int | None
    """Control steps until success; None if it failed."""


def run_episode(
    scene: Scene, init_state: np.ndarray, actions: list[np.ndarray] | None, step_limit: int
) -> Episode:
    """Run the expert's episode, or one with these actions."""
    scene.start_episode(init_state)
    for _ in range(NUM_SETTLE_STEPS):
        scene.run_control_step(np.array(IDLE_ACTION))
    expert, done, coordinates = Expert(scene), list[np.ndarray](), list[np.ndarray]()
    for number in range(step_limit if actions is None else len(actions)):
        done.append(expert.act().astype(np.float64) if actions is None else actions[number])
        is_success = scene.run_control_step(done[-1])
        coordinates.append(scene.data.qpos.copy())
        if is_success:
            return Episode(done, coordinates, number + 1)
    return Episode(done, coordinates, None)


def differences(task: Task, assets: Path) -> list[tuple[int | None, int | None, float]]:
    """Return, for each initial state, the steps until success in exact and fast physics, and the
    largest difference.
    """
    scene, found = Scene(task, assets, 0), []
    try:
        for init_state_id in INIT_STATE_IDS:
            init_state = read_init_states(task.init_states_file)[init_state_id]
            scene.physics = "exact"
            exact = run_episode(scene, init_state, None, STEP_LIMITS[task.suite])
            scene.physics = "fast"
            fast = run_episode(scene, init_state, exact.actions, STEP_LIMITS[task.suite])
            pairs = zip(exact.coordinates, fast.coordinates, strict=False)
            found.append(
                (exact.num_steps, fast.num_steps, max(float(np.abs(a - b).max()) for a, b in pairs))
            )
        return found
    finally:
        scene.close()


def main() -> None:
    """Run the episodes, print a row for each, and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--assets", help="folder of LIBERO's assets, or stand-ins for the placeholder assets"
    )
    assets = find_assets(parser.parse_args().assets)
    found = []
    for task in (find_task(suite, task_id) for suite in SUITES for task_id in TASK_IDS):
        for init_state_id, row in zip(INIT_STATE_IDS, differences(task, assets.path), strict=True):
            print(
                f"{task.key:18} initial state {init_state_id}: {row[0]} and {row[1]} steps, "
                f"{row[2]:.1e}",
                flush=True,
            )
            found.append(row)
    errors = [error for *_, error in found]
    print_json_line(
        {
            "assets": assets.source,
            "same_step": sum(exact == fast for exact, fast, _ in found) / len(found),
            "middle": statistics.median(errors),
            "worst": max(errors),
            "episodes": len(found),
        }
    )


if __name__ == "__main__":
    main()
