"""Conversations in which a planner fulfils a request by calls of a robot, made up without a simulator.

`sft_text --task requests` trains a small planner on them for `grpo_planner`. They have mistakes, so that something is
left to be learnt from the robot itself: a skill that was not asked for, or an end before all is done. Calls of the
robot fail in them too, and are repeated.
"""

import functools
import json
import random
from collections.abc import Sequence
from typing import Final

from vla_rl.envs.libero.request_env import list_facts, list_skills, make_sentence
from vla_rl.envs.libero.requests import Request, draw_requests
from vla_rl.envs.libero.task_files import read_goals
from vla_rl.envs.libero.tasks import find_task, list_tasks
from vla_rl.rollout import PlannerConfig
from vla_rl.rollout.planner_agent import DO, FINISH, describe_tools, make_answer, make_question
from vla_rl.types import Message, ToolCall, ToolSpec, derive_seed

SUITE: Final = "libero_goal"
SCENE_TASK: Final = 0
"""The task of the suite whose scene and starts the requests have; all ten share one scene."""

NUM_REQUESTS: Final = 2000
"""Requests that conversations are about, drawn as `grpo_planner` draws those to train on."""

MAX_TURNS: Final = PlannerConfig().max_turns

FAILED_CALLS: Final = 0.25
"""Share of calls that run to their last control step and change nothing."""

EARLY_ENDS: Final = 0.25
"""Share of mistakes that end the episode."""


def list_planner_tools() -> tuple[ToolSpec, ...]:
    """Return the tools of `grpo_planner`, as its planner reads them."""
    return describe_tools(list_skills(find_task(SUITE, SCENE_TASK)), PlannerConfig())


def demonstrate_plan(seed: int, mistakes: float) -> tuple[Message, ...]:
    """Draw one conversation about a request to train on.

    Args:
        seed: seed of the request and of all that happens.
        mistakes: probability that a reply is a mistake.
    """
    dice = random.Random(derive_seed(seed, "plan"))
    request = dice.choice(_draw_training_requests())
    skills = _list_goals()
    left = [_find_skill(goal, skills) for goal in request.goals]
    facts: list[list[str]] = []
    messages = [*make_question(request.request, ())]
    for turn in range(MAX_TURNS):
        is_mistaken = dice.random() < mistakes
        if not left or (is_mistaken and dice.random() < EARLY_ENDS):
            messages.append(_call(turn, FINISH, {}))
            break
        instruction = dice.choice(sorted(skills)) if is_mistaken else left[0]
        messages.append(_call(turn, DO, {"instruction": instruction}))
        num_steps = PlannerConfig().max_call_steps
        if dice.random() >= FAILED_CALLS:
            num_steps = dice.randrange(30, num_steps)
            facts = change_facts(facts, skills[instruction])
            left = [each for each in left if each != instruction]
        answer = " ".join([f"ran {num_steps} steps.", *_list_sentences(facts)])
        messages.append(make_answer(messages[-1].tool_calls[0], answer))
    return tuple(messages)


@functools.cache
def _draw_training_requests() -> list[Request]:
    return draw_requests("train", NUM_REQUESTS)


def _call(turn: int, name: str, arguments: dict[str, str]) -> Message:
    call = ToolCall(id=f"call_{turn}", name=name, arguments=json.dumps(arguments))
    return Message(role="assistant", content="", tool_calls=(call,))


def _find_skill(goal: str, skills: dict[str, list[list[str]]]) -> str:
    return next(words for words, goals in skills.items() if goal.split() in goals)


def change_facts(facts: list[list[str]], goals: list[list[str]]) -> list[list[str]]:
    """Return what holds after a skill: a thing that is put somewhere is no longer where it was."""
    moved = {goal[1] for goal in goals if len(goal) > 2}
    return [fact for fact in facts if len(fact) < 3 or fact[1] not in moved] + goals


def _list_sentences(facts: Sequence[Sequence[str]]) -> list[str]:
    return [make_sentence(fact) for fact in _list_known_facts() if fact in facts]


# Reading goal files takes longer than a training step.


@functools.cache
def _list_goals() -> dict[str, list[list[str]]]:
    """Return the goals of each skill."""
    return {task.instruction: read_goals(task.goal_file) for task in list_tasks(SUITE)}


@functools.cache
def _list_known_facts() -> list[list[str]]:
    return list_facts(find_task(SUITE, SCENE_TASK))
