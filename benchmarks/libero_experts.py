"""Success rates of the scripted experts:
`python -m benchmarks.libero_experts --suites libero_object --assets stand-ins`.

Runs every task of the suites from each of LIBERO's initial states (or the first `--init-states`),
without images, in this process. Prints one row a task; the last line is JSON: for each suite its
success rate and the mean length of its successes.
"""

import argparse
import json
from collections.abc import Sequence

import numpy as np

from vla_rl.envs.libero.assets import Assets, find_assets
from vla_rl.envs.libero.env import IDLE_ACTION
from vla_rl.envs.libero.experts import Expert
from vla_rl.envs.libero.scene import Scene
from vla_rl.envs.libero.task_files import read_init_states
from vla_rl.envs.libero.tasks import STEP_LIMITS, Task, list_tasks

NUM_SETTLE_STEPS = 10


def expert_lengths(
    task: Task, assets: Assets, init_state_ids: Sequence[int], scene_seed: int = 0
) -> list[int | None]:
    """Return the control steps until the expert's success (fast physics) for each initial state.

    None if it failed.
    """
    scene = Scene(task, assets.path, scene_seed)
    scene.physics = "fast"
    try:
        init_states = read_init_states(task.init_states_file)
        lengths = []
        for init_state_id in init_state_ids:
            if init_state_id < len(init_states):
                scene.start_episode(init_states[init_state_id])
            else:
                scene.start_drawn_episode(init_state_id)
            lengths.append(_run_expert(scene, STEP_LIMITS[task.suite]))
        return lengths
    finally:
        scene.close()


def _run_expert(scene: Scene, step_limit: int) -> int | None:
    for _ in range(NUM_SETTLE_STEPS):
        scene.run_control_step(np.array(IDLE_ACTION))
    expert = Expert(scene)
    for num_steps in range(1, step_limit + 1):
        if scene.run_control_step(expert.act().astype(np.float64)):
            return num_steps
    return None


def main() -> None:
    """Measure, print a row a task, and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--suites",
        nargs="+",
        default=["libero_object", "libero_spatial", "libero_goal", "libero_10"],
    )
    parser.add_argument(
        "--assets", help="folder of LIBERO's assets, or stand-ins for the placeholder assets"
    )
    parser.add_argument("--tasks", nargs="+", type=int, help="only these tasks of each suite")
    parser.add_argument(
        "--init-states", type=int, help="use only this many initial states, the first ones"
    )
    parser.add_argument(
        "--drawn",
        type=int,
        help="use this many drawn starts (numbers from 1000 on) instead of LIBERO's own",
    )
    arguments = parser.parse_args()
    assets = find_assets(arguments.assets)
    report: dict[str, object] = {"assets": assets.source}
    for suite in arguments.suites:
        lengths: list[int | None] = []
        for task in list_tasks(suite):
            if arguments.tasks is not None and task.task_id not in arguments.tasks:
                continue
            starts = range(arguments.init_states or task.num_init_states)
            if arguments.drawn is not None:
                starts = range(1000, 1000 + arguments.drawn)
            episodes = expert_lengths(task, assets, starts)
            failed = [
                start for start, length in zip(starts, episodes, strict=True) if length is None
            ]
            done = [length for length in episodes if length is not None]
            mean = f"{np.mean(done):.0f}" if done else "-"
            print(
                f"{task.key:18} {len(done):3}/{len(episodes)} length {mean:>4} failed {failed} "
                f"{task.instruction}",
                flush=True,
            )
            lengths += episodes
        successes = [length for length in lengths if length is not None]
        report[f"{suite}_success_rate"] = round(len(successes) / max(len(lengths), 1), 4)
        report[f"{suite}_mean_length"] = round(float(np.mean(successes)), 1) if successes else None
        report[f"{suite}_episodes"] = len(lengths)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
