"""LIBERO's tasks by suite, in their packages' own order (from 0).

A package lists the tasks of a suite in a plain data file, with goal files (`.bddl`) and files of
initial states beside it. Only those files are read; LIBERO's own task list (its benchmark module)
imports torch and is never loaded.
"""

import difflib
import functools
import importlib.util
import re
from pathlib import Path

import msgspec

from vla_rl.envs.image_env import is_whole
from vla_rl.envs.libero.packages import (
    LIBERO,
    Variant,
    find_package_root,
    get_package_command,
    get_suite_change,
    join_suite,
    list_installed_packages,
    parse_variant,
    split_suite,
)
from vla_rl.envs.libero.task_files import (
    find_init_states,
    read_goals,
    read_init_states,
    read_instruction,
    read_names,
)

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
"""LIBERO's own suites."""

STEP_LIMITS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
"""Control steps after which an episode has failed, as in published results (OpenVLA,
OpenVLA-OFT)."""

LONGEST_STEP_LIMIT = max(STEP_LIMITS.values())
"""Step limit for suites without a published one."""

_SCENE_PREFIX = re.compile(r"^[A-Z_]+_SCENE\d+_")


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One task of a suite.

    Its files are read on access, because some packages have thousands of tasks.

    Example:
        Task(suite="libero_goal", task_id=7, name="turn_on_the_stove")
        Task(suite="liberoplus.libero_object", task_id=248, name="pick_up_the_alphabet_soup_and_"
            "place_it_in_the_basket_view_0_0_100_0_0_initstate_11")
    """

    suite: str
    """Full name of the suite: `libero_goal`, or with its package, `liberopro.libero_goal_swap`."""

    task_id: int
    """Position in the package's own order."""

    name: str
    """The package's name of the task."""

    @property
    def key(self) -> str:
        """Name in results, such as `libero_goal/3`."""
        return f"{self.suite}/{self.task_id}"

    @property
    def package(self) -> str:
        """The package of the task."""
        return split_suite(self.suite)[0]

    @property
    def variant(self) -> Variant:
        """The variant that the task's name describes."""
        return parse_variant(split_suite(self.suite)[1], self.name)

    @property
    def perturbation(self) -> str:
        """The kind of change: `camera`, `swap`, ...; empty for LIBERO's own tasks."""
        suite = split_suite(self.suite)[1]
        return self.variant.kind or get_suite_change(suite, get_origin_suite(suite))

    @property
    def instruction(self) -> str:
        """The task in words, for policies: LIBERO's name of the task without its scene, as for
        published policies.

        If the goal file's words differ from those of the original task, it is the goal file's
        words: they are the perturbation.
        """
        return _read_instruction(self)

    @property
    def num_init_states(self) -> int:
        """Number of fixed initial states.

        Raises: `FileNotFoundError`, `ValueError` for a bad file.
        """
        return _count_init_states(self.init_states_file)

    @property
    def goal_file(self) -> Path:
        """The file that describes the scene and the goal."""
        folder = find_package_root(self.package) / "bddl_files" / split_suite(self.suite)[1]
        return folder / f"{self.variant.goal_stem}.bddl"

    @property
    def init_states_file(self) -> Path:
        """The file of the fixed initial states.

        Raises: `FileNotFoundError` if the package lacks it.
        """
        return find_init_states(
            find_package_root(self.package) / "init_files" / self.variant.states_stem, self.key
        )


def list_tasks(suite: str) -> tuple[Task, ...]:
    """Return all tasks of `suite`, in the package's order.

    Raises: `ValueError` for an unknown suite, `FileNotFoundError` for one whose goal files are not
        installed, `ImportError` if its package is not.
    """
    package, name = split_suite(suite)
    names = _read_suites(package)
    if name not in names:
        raise ValueError(
            f"suite is {suite!r}, {_suggest_suite(suite)}expected one of {', '.join(list_suites(package))}."
        )
    folder = find_package_root(package) / "bddl_files" / name
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{package} lists the suite {suite}, but holds no goal files for it ({folder}): this "
            "distribution of the package leaves them out. Suites with files: "
            f"{', '.join(list_suites(package))}."
        )
    # No file of a task is read here: some variants lack initial states, and one of them made every
    # task of its suite fail.
    return _list_package_tasks(package, name)


def list_suites(package: str = LIBERO) -> tuple[str, ...]:
    """Return the suites with goal files, LIBERO's own first.

    Raises: `ImportError` if the package is not installed.
    """
    folder = find_package_root(package) / "bddl_files"
    return tuple(
        join_suite(package, name) for name in _read_suites(package) if (folder / name).is_dir()
    )


def get_step_limit(suite: str) -> int:
    """Return the control steps after which an episode of `suite` has failed; a variant
    (`libero_goal_swap`) has its origin's.
    """
    origin = get_origin_suite(split_suite(suite)[1])
    return STEP_LIMITS[origin] if origin is not None else LONGEST_STEP_LIMIT


def find_task(suite: str, task_id: int) -> Task:
    """Return the task `task_id` of `suite`.

    Raises: as `list_tasks`; `ValueError` for a task id out of range.
    """
    tasks = list_tasks(suite)
    if not is_whole(task_id) or not 0 <= task_id < len(tasks):
        raise ValueError(
            f"task_id is {task_id!r}, expected 0 to {len(tasks) - 1}: {suite} has "
            f"{len(tasks)} tasks."
        )
    return tasks[task_id]


def get_origin_suite(suite: str) -> str | None:
    """Return LIBERO's suite that `suite`, without its package, was made from, or None."""
    origins = [known for known in SUITES if suite == known or suite.startswith(f"{known}_")]
    return max(origins, key=len) if origins else None


def is_extension_task(task: Task) -> bool:
    """Return whether `task` is none of LIBERO's own, but one of LIBERO-PRO, LIBERO-plus or alike."""
    return task.package != LIBERO or task.suite not in SUITES


def libero_root() -> Path:
    """Return the folder of the installed LIBERO that holds `bddl_files` and `init_files`.

    Raises: `ImportError`.
    """
    return find_package_root(LIBERO)


def _suggest_suite(suite: str) -> str:
    known = [each for package in list_installed_packages() for each in list_suites(package)]
    namesakes = [each for each in known if split_suite(each)[1] == suite]
    close = namesakes or difflib.get_close_matches(suite, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? " if close else ""


@functools.cache
def _read_suites(package: str) -> dict[str, list[str]]:
    """Return names of tasks by suite: LIBERO's five first, then the package's others, then folders
    missing in its list.
    """
    listed, root = _read_task_names(package), find_package_root(package)
    suites = {
        name: listed[name] for name in (*(each for each in SUITES if each in listed), *listed)
    }
    for folder in sorted((root / "bddl_files").iterdir()):
        files = sorted(path.stem for path in folder.glob("*.bddl"))
        if folder.name in suites or not files or not (root / "init_files" / folder.name).is_dir():
            continue
        like_origin = listed.get(get_origin_suite(folder.name) or "", [])
        suites[folder.name] = like_origin if sorted(like_origin) == files else files
    return suites


@functools.cache
def _list_package_tasks(package: str, suite: str) -> tuple[Task, ...]:
    names = _read_suites(package)[suite]
    return tuple(
        Task(suite=join_suite(package, suite), task_id=task_id, name=name)
        for task_id, name in enumerate(names)
    )


@functools.cache
def _read_task_names(package: str) -> dict[str, list[str]]:
    path = find_package_root(package) / "benchmark" / "libero_suite_task_map.py"
    # The list alone: LIBERO's benchmark module imports torch, 2.4 s and 510 MB.
    spec = importlib.util.spec_from_file_location("_libero_suite_task_map", path)
    if spec is None or spec.loader is None:
        raise ImportError(
            f"{path} cannot be read; reinstall it with `{get_package_command(package)}`."
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names: dict[str, list[str]] = module.libero_task_map
    return names


@functools.cache
def _read_instruction(task: Task) -> str:
    suite = split_suite(task.suite)[1]
    origin = task.variant.origin
    in_words = _SCENE_PREFIX.sub("", origin).replace("_", " ")
    if suite in SUITES and task.name == origin:
        return in_words
    words = read_instruction(task.goal_file)
    folder = find_package_root(task.package) / "bddl_files" / (get_origin_suite(suite) or "")
    original = folder / f"{origin}.bddl"
    # the goal files of 29 of LIBERO's tasks have other words than their names, which published
    # policies know; only words that differ from the original's are a change of the instruction
    is_unchanged = original.is_file() and read_instruction(original).lower() == words.lower()
    return in_words if is_unchanged else words


@functools.cache
def _count_init_states(path: Path) -> int:
    return len(read_init_states(path))


def read_other_goals(task: Task, other_id: int) -> list[list[str]]:
    """Return the goals of another task of the suite. Raises: ValueError if they are not in the task's scene."""
    other = find_task(task.suite, other_id)
    goals = read_goals(other.goal_file)
    if other.key == task.key or not {name for goal in goals for name in goal[1:]} <= read_names(
        task.goal_file
    ):
        raise ValueError(
            f"after_task is {other_id}, expected another task of {task.suite} in the scene of {task.key}."
        )
    return goals
