"""Success rates of Meta-World's scripted policies:
`python -m benchmarks.metaworld_experts --suite metaworld_mt50`.

Runs every task of a suite from its first starts, without images, in this process. Prints one row a
task; the last line is JSON: the suite's success rate, the mean length of the successes, and control
steps per second of this process.
"""

import argparse
import json
import time
from collections.abc import Sequence

import numpy as np

from vla_rl.envs.metaworld.env import MetaWorldExpert
from vla_rl.envs.metaworld.scene import Scene
from vla_rl.envs.metaworld.tasks import STEP_LIMIT, SUITES, Task, list_tasks


def expert_lengths(task: Task, starts: Sequence[int]) -> list[int | None]:
    """Return the control steps until the expert's success for each start; None if it failed."""
    scene = Scene(task)
    try:
        lengths = []
        for start in starts:
            scene.start_episode(start)
            lengths.append(_run(scene))
        return lengths
    finally:
        scene.close()


def _run(scene: Scene) -> int | None:
    expert = MetaWorldExpert(scene)
    for num_steps in range(1, STEP_LIMIT + 1):
        if scene.run_control_step(expert.act().astype(np.float64)):
            return num_steps
    return None


def main() -> None:
    """Measure, print a row a task, and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=list(SUITES), default="metaworld_mt50")
    parser.add_argument("--starts", type=int, default=50, help="number of starts of each task")
    arguments = parser.parse_args()
    lengths: list[int | None] = []
    started = time.perf_counter()
    for task in list_tasks(arguments.suite):
        episodes = expert_lengths(task, range(arguments.starts))
        done = [length for length in episodes if length is not None]
        failed = [start for start, length in enumerate(episodes) if length is None]
        mean = f"{np.mean(done):.0f}" if done else "-"
        print(
            f"{task.key:18} {task.name:26} {len(done):3}/{len(episodes)} length {mean:>4} "
            f"failed {failed}",
            flush=True,
        )
        lengths += episodes
    seconds = time.perf_counter() - started
    successes = [length for length in lengths if length is not None]
    num_steps = sum(STEP_LIMIT if length is None else length for length in lengths)
    report = {
        "suite": arguments.suite,
        "success_rate": round(len(successes) / len(lengths), 4),
        "mean_length": round(float(np.mean(successes)), 1) if successes else None,
        "episodes": len(lengths),
        "control_steps_per_s": round(num_steps / seconds),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
