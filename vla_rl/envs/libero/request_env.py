"""`LiberoRequestEnv`: a scene of LIBERO with a request of several goals, whose episode goes on when they hold.

An environment of one task ends as soon as its goal holds. Here the episode goes on: a request may be of
several skills, in an order, with things that must not be, and only the one who was asked knows when it is
done. Goals are predicates of LIBERO's goal files, evaluated by LIBERO's own code after each control step.
"""

import os
import string
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from gymnasium import spaces

from vla_rl.envs.gymnasium_adapters import Words
from vla_rl.envs.image_env import require_state
from vla_rl.envs.libero.assets import find_package_assets
from vla_rl.envs.libero.env import LiberoEnv
from vla_rl.envs.libero.scene import Scene, SceneKey, prepare_scene
from vla_rl.envs.libero.task_files import read_goals, read_names
from vla_rl.envs.libero.tasks import Task, find_task, list_tasks
from vla_rl.envs.mujoco.drawing_quality import Quality
from vla_rl.types import Info, Observation

PREDICATES: Final = {"on": 2, "in": 2, "open": 1, "close": 1, "turnon": 1, "turnoff": 1}
"""Predicates of a request, with the number of names that each takes."""

UNDONE_STEPS: Final = 20
"""Control steps, a second, after which a goal that no longer holds is undone. A thing that is put down
bounces: `on` is true at the first touch, and may be false at the next step."""

_prepared: set[tuple[object, ...]] = set()
"""Arguments of the scenes that this process has prepared."""

SENTENCES: Final = {
    "on": "The {} is on the {}.",
    "in": "The {} is in the {}.",
    "open": "The {} is open.",
    "turnon": "The {} is on.",
}


class LiberoRequestEnv(LiberoEnv):
    """A Panda arm in a scene of LIBERO, with a request in words.

    Observation, action and starts are those of `LiberoEnv` for the task whose scene it is. What differs:

    Observation: `instruction` is the request.
    Reward: the change of the progress in that control step. Progress is the share of the goals that hold,
        less that share for each forbidden one that holds; with `in_order`, goals count from the first on, as
        long as each came true after the one before it; one that comes undone for a second comes true anew.
    The hand: after a chunk at whose end a sentence of the scene is newly true, the hand lets go and returns to where
        episodes begin, in 20 to 45 further control steps that count, so that the next skill begins where skills are
        learnt. A single control step is a chunk.
    Truncated: after `step_limit` control steps. It never terminates by itself.
    Info: also goals (for each, whether it holds) and scene (true sentences; absent inside of a chunk), and at
        the start request and skills (the instructions of the suite's tasks in this scene). `is_success`: all
        goals hold, in their order if that was asked for, and nothing forbidden does.

    Args:
        request: the words of the request.
        goals: predicates such as "on wine_bottle_1 wine_rack_1_top_region".
        forbidden: predicates that must not hold.
        in_order: the goals have to come true one after the other.
        suite, task_id: the task whose scene and starts these are.
        others: keywords of `LiberoEnv`; `step_limit` is 600 without one.

    Raises: as `LiberoEnv`; `ValueError` for a predicate that is unknown, or names something that is not in
        the scene.
    """

    def __init__(
        self,
        request: str = "",
        goals: Sequence[str] = (),
        forbidden: Sequence[str] = (),
        in_order: bool = False,
        suite: str = "libero_goal",
        task_id: int = 0,
        step_limit: int | None = None,
        **others: Any,
    ) -> None:
        if not isinstance(request, str) or not request or not goals:
            raise ValueError(
                "request or goals are missing, expected the words of a request and its predicates: "
                'request="put the bowl on the plate", goals=["on akita_black_bowl_1 plate_1"].'
            )
        # first of all: the observation space has the request's characters
        self._request, self._in_order = request, in_order
        super().__init__(suite, task_id, step_limit=step_limit or 600, **others)
        check_request(self.task, goals, forbidden)
        _check_predicates(self.scene, self.task, (*goals, *forbidden))
        self._goals, self._forbidden = (
            [goal.split() for goal in goals],
            [each.split() for each in forbidden],
        )
        self._facts = list_facts(self.task)
        self._skills = list_skills(self.task)
        self._holds = [False] * len(goals)
        self._came_true = [-1] * len(goals)
        """Control step at which each goal came true; -1 before, and once it is undone."""
        self._missed = [0] * len(goals)
        """Control steps since each goal held last."""
        self._progress = 0.0
        self._known: list[list[str]] = []
        """Facts that held when somebody looked last."""

    @classmethod
    def prepare(
        cls,
        suite: str = "libero_goal",
        task_id: int = 0,
        assets: str | os.PathLike[str] | None = None,
        scene_seed: int = 0,
        image_size: int = 224,
        quality: Quality = "exact",
        **of_each_env: Any,
    ) -> None:
        """Build the scene, as `LiberoEnv.prepare`, once for all requests that share it, and check the predicates.

        Raises: as the constructor, so that a run ends at its start and not once a wrong request has its turn.
        """
        key = (suite, task_id, str(assets), scene_seed, image_size, quality)
        # Hundreds of requests share a scene, and preparing it takes seconds.
        if key not in _prepared:
            super().prepare(suite, task_id, assets, scene_seed, image_size, quality)
            _prepared.add(key)
        task = find_task(suite, task_id)
        scene = prepare_scene(
            SceneKey(task, find_package_assets(task.package, assets).path, scene_seed)
        )
        asked = (*of_each_env.get("goals", ()), *of_each_env.get("forbidden", ()))
        _check_predicates(scene, task, asked)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start an episode; goals that hold already came true before all others."""
        self._came_true, self._missed = [-1] * len(self._goals), [0] * len(self._goals)
        observation, _ = super().reset(seed=seed, options=options)
        self._look_at_goals()
        self._known = self._list_true_facts()
        self._progress, self._is_success = self._measure_progress()
        return observation, self._info()

    def _make_observation_space(self) -> spaces.Dict:
        # one space for all requests in ASCII, as a vector environment needs it
        others = "".join(sorted(set(self._request) - set(string.printable)))
        words = Words(max(1024, len(self._request)), charset=string.printable + others)
        return spaces.Dict({**super()._make_observation_space().spaces, "instruction": words})

    def _observation(self) -> Observation:
        return {**super()._observation(), "instruction": self._request}

    def get_state(self) -> dict[str, Any]:
        """Return the whole state, with what of the request has come true."""
        return {
            **super().get_state(),
            "came_true": list(self._came_true),
            "missed": list(self._missed),
            "known": self._known,
        }

    def set_state(self, state: dict[str, Any]) -> Observation:
        """Continue from a state of the same request. Raises: as `LiberoEnv`."""
        require_state(state, ())
        came_true, missed = (
            [int(step) for step in state.get(name, ())] for name in ("came_true", "missed")
        )
        if not len(came_true) == len(missed) == len(self._goals):
            raise ValueError(
                f"the state has {len(came_true)} goals, expected {len(self._goals)}: one of the same request."
            )
        observation = super().set_state(state)
        self._came_true, self._missed = came_true, missed
        self._known = state.get("known", self._list_true_facts())
        self._holds = [self.scene.holds(goal) for goal in self._goals]
        self._progress, _ = self._measure_progress()
        return observation

    def _evaluate_step(self, is_goal_reached: bool) -> tuple[float, bool, bool]:
        self._look_at_goals()
        # Inside of a chunk nobody looks, and the rest of its rows was chosen for a hand that stays.
        if self.render_every_step:
            self._return_after_news()
        before = self._progress
        self._progress, is_success = self._measure_progress()
        return self._progress - before, is_success, False

    def _return_after_news(self) -> None:
        from vla_rl.envs.libero.experts.motions import return_home

        known, self._known = self._known, self._list_true_facts()
        if all(fact in known for fact in self._known):
            return
        for action in return_home(self.scene):
            if self._num_steps == self.step_limit:
                return
            self.scene.run_control_step(action.astype(np.float64))
            self._num_steps += 1
            self._look_at_goals()
        self._known = self._list_true_facts()

    def _list_true_facts(self) -> list[list[str]]:
        return [fact for fact in self._facts if self.scene.holds(fact)]

    def _look_at_goals(self) -> None:
        self._holds = [self.scene.holds(goal) for goal in self._goals]
        for number, holds in enumerate(self._holds):
            self._missed[number] = 0 if holds else self._missed[number] + 1
            if self._missed[number] >= UNDONE_STEPS:
                self._came_true[number] = -1
            elif holds and self._came_true[number] < 0:
                self._came_true[number] = self._num_steps

    def _measure_progress(self) -> tuple[float, bool]:
        """Return the progress, and whether the request is fulfilled."""
        reached = 0
        for number, step in enumerate(self._came_true):
            is_due = not self._in_order or number == 0 or 0 <= self._came_true[number - 1] <= step
            if self._holds[number] and is_due:
                reached += 1
            elif self._in_order:
                break
        num_wrong = sum(self.scene.holds(each) for each in self._forbidden)
        total = len(self._goals)
        return (reached - num_wrong) / total, reached == total and num_wrong == 0

    def _settings(self) -> Info:
        info = super()._settings()
        # Sentences only where somebody looks: inside of a chunk nobody does.
        if self.render_every_step or self._is_over:
            info["scene"] = [make_sentence(fact) for fact in self._list_true_facts()]
        if self._num_steps == 0:
            info |= {"request": self._request, "skills": self._skills}
        return {**info, "goals": list(self._holds)}


def _check_predicates(scene: Scene, task: Task, predicates: Sequence[str]) -> None:
    """Raise ValueError naming a predicate that LIBERO cannot evaluate, such as whether a plate is open."""
    for predicate in predicates:
        words = predicate.split()
        if (error := scene.find_fault(words)) is None:
            continue
        others = [
            name
            for name in sorted(read_names(task.goal_file))
            if scene.find_fault([*words[:-1], name]) is None
        ]
        raise ValueError(
            f"the predicate {predicate!r} cannot be evaluated in the scene of {task.key} (LIBERO's code raises "
            f"{type(error).__name__}); expected as its last name "
            + (
                f"one of {', '.join(others)}"
                if others
                else "a thing or a region, after the name of a thing"
            )
        ) from error


def check_request(task: Task, goals: Sequence[str], forbidden: Sequence[str] = ()) -> None:
    """Check that predicates can hold in the scene of a task, without the simulator, and none is forbidden
    that is a goal.

    Raises: ValueError naming the predicate, and what is wrong with it.
    """
    if not goals:
        raise ValueError("the request has no goals, expected at least one predicate")
    known = read_names(task.goal_file)
    for predicate in (*goals, *forbidden):
        name, *arguments = predicate.split() or [""]
        if len(arguments) != PREDICATES.get(name):
            raise ValueError(
                f"the predicate {predicate!r} is none of "
                f"{', '.join(f'{each} with {num} names' for each, num in PREDICATES.items())}"
            )
        for argument in arguments:
            if argument not in known:
                raise ValueError(
                    f"the predicate {predicate!r} names {argument!r}, which is not in the scene of "
                    f"{task.key}; there are {', '.join(sorted(known))}"
                )
    wanted, unwanted = ({" ".join(each.split()) for each in group} for group in (goals, forbidden))
    if both := wanted & unwanted:
        raise ValueError(
            f"{min(both)!r} is a goal and forbidden, so that nothing fulfils the request"
        )


def list_facts(task: Task) -> list[list[str]]:
    """Return the goals of the suite's tasks that are predicates about this task's scene."""
    known = read_names(task.goal_file)
    found: list[list[str]] = []
    for other in list_tasks(task.suite):
        for goal in read_goals(other.goal_file):
            if goal not in found and goal[0] in SENTENCES and set(goal[1:]) <= known:
                found.append(goal)
    return found


def list_skills(task: Task) -> list[str]:
    """Return the instructions of the suite's tasks whose goals are about this task's scene."""
    known = read_names(task.goal_file)
    return [
        other.instruction
        for other in list_tasks(task.suite)
        if all(set(goal[1:]) <= known for goal in read_goals(other.goal_file))
    ]


def make_sentence(fact: Sequence[str]) -> str:
    """Return a fact in words, such as "The flat stove is on." for ["turnon", "flat_stove_1"]."""
    return SENTENCES[fact[0]].format(*(name_in_words(name) for name in fact[1:]))


def name_in_words(name: str) -> str:
    """Return the words for an object or a region.

    >>> name_in_words("wine_rack_1_top_region")
    'top region of the wine rack'
    """
    parts = name.split("_")
    numbers = [index for index, part in enumerate(parts) if part.isdecimal()]
    if not numbers:
        return " ".join(parts)
    thing, region = " ".join(parts[: numbers[0]]), " ".join(parts[numbers[0] + 1 :])
    return f"{region} of the {thing}" if region else thing
