"""Which tasks there are: the suites of the installed LIBERO in its own order (index 0), read without importing LIBERO.

hf-libero names the tasks of a suite in a plain data file, and keeps one goal file (`.bddl`) and one file of initial
states beside it. Those files are found through the installed package; LIBERO's own task list (its benchmark module)
imports torch and is never loaded.
"""

import difflib
import functools
import importlib.util
import re
from pathlib import Path

import msgspec

from vla_rl.envs.libero.init_states import read_init_states
from vla_rl.installing import pip_command

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
"""LIBERO's own. A package that takes its place (LIBERO-plus, LIBERO-PRO) may have more; those are found as well."""

STEP_LIMITS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
"""Control steps after which an episode has failed, as published results count (OpenVLA, OpenVLA-OFT)."""

LONGEST_STEP_LIMIT = max(STEP_LIMITS.values())
"""For suites that nobody has published a limit for."""

NUM_STARTS = 1 << 31
"""Starts of a task, by number: first LIBERO's fixed initial states, then those that are drawn (`drawn_starts`)."""

_SCENE_PREFIX = re.compile(r"^[A-Z_]+_SCENE\d+_")


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One task of a suite."""

    suite: str
    task_id: int
    """Position in LIBERO's own order."""

    name: str
    """LIBERO's name, which is also that of its files."""

    instruction: str
    """The task in words, as the policies are told it: the name without its scene, with spaces."""

    num_init_states: int
    """How many fixed initial states LIBERO ships for it."""

    @property
    def key(self) -> str:
        """What results are reported under, such as `libero_goal/3`."""
        return f"{self.suite}/{self.task_id}"

    @property
    def goal_file(self) -> Path:
        """The file that describes the scene and the goal."""
        return libero_root() / "bddl_files" / self.suite / f"{self.name}.bddl"

    @property
    def init_states_file(self) -> Path:
        """The file of the fixed initial states."""
        return _init_states_file(self.suite, self.name)


def list_tasks(suite: str) -> tuple[Task, ...]:
    """All tasks of `suite`, in LIBERO's order. Raises: `ValueError` for an unknown suite."""
    suites = _installed_suites()
    if suite not in suites:
        close = difflib.get_close_matches(suite, suites, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"suite is {suite!r}, {hint}expected one of {', '.join(suites)}.")
    return _tasks_of(suite)


def step_limit_of(suite: str) -> int:
    """Control steps after which an episode of `suite` has failed; of a variant (`libero_goal_swap`), its origin's."""
    origins = [known for known in STEP_LIMITS if suite.startswith(known)]
    return STEP_LIMITS[max(origins, key=len)] if origins else LONGEST_STEP_LIMIT


def find_task(suite: str, task_id: int) -> Task:
    """The task `task_id` of `suite`. Raises: `ValueError` for an unknown suite or a task id out of range."""
    tasks = list_tasks(suite)
    if not isinstance(task_id, int) or isinstance(task_id, bool) or not 0 <= task_id < len(tasks):
        raise ValueError(f"task_id is {task_id!r}, expected 0 to {len(tasks) - 1}: {suite} has {len(tasks)} tasks.")
    return tasks[task_id]


@functools.cache
def libero_root() -> Path:
    """The folder of the installed LIBERO that holds `bddl_files` and `init_files`; nothing of it is executed."""
    package = importlib.util.find_spec("libero")
    for location in package.submodule_search_locations or () if package is not None else ():
        if (Path(location) / "libero" / "bddl_files").is_dir():
            return Path(location) / "libero"
    raise ImportError(f"LIBERO is not installed; run `{pip_command('libero')}`.")


@functools.cache
def _installed_suites() -> tuple[str, ...]:
    """LIBERO's five first, then whatever else the installed package has goal files for."""
    others = [suite for suite in _task_names() if suite not in SUITES]
    return SUITES + tuple(suite for suite in others if (libero_root() / "bddl_files" / suite).is_dir())


@functools.cache
def _tasks_of(suite: str) -> tuple[Task, ...]:
    return tuple(
        Task(
            suite=suite,
            task_id=task_id,
            name=name,
            instruction=_SCENE_PREFIX.sub("", name).replace("_", " "),
            num_init_states=len(read_init_states(_init_states_file(suite, name))),
        )
        for task_id, name in enumerate(_task_names()[suite])
    )


@functools.cache
def _task_names() -> dict[str, list[str]]:
    path = libero_root() / "benchmark" / "libero_suite_task_map.py"
    spec = importlib.util.spec_from_file_location("_libero_suite_task_map", path)
    if spec is None or spec.loader is None:
        raise ImportError(
            f"{path} cannot be read; install hf-libero again with `{pip_command('libero')} --force-reinstall`."
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names: dict[str, list[str]] = module.libero_task_map
    return names


def _init_states_file(suite: str, name: str) -> Path:
    return libero_root() / "init_files" / suite / f"{name}.pruned_init"
