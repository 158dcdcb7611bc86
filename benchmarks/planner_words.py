"""How many requests a planner fulfils in words, where every call does at once what it says.

    python -m benchmarks.planner_words                      the planner that ships
    python -m benchmarks.planner_words FOLDER [FOLDER ...]  others, such as checkpoints of `grpo_planner`

No simulator runs, so that it takes a minute or two. Plans alone are counted: neither a robot that fails nor the limit
of control steps is in it. Requests of training and held-out ones, each asked once, by the likeliest tokens and by
samples at temperature 1.

Keys of the last line, lists by planner: `planner`, its folder; `train`, `combinations`, `wordings`, percent by samples;
the same names with `_likeliest`.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.interleaved import print_json_line
from benchmarks.planned_runs import format_rate, percent, print_rows
from vla_rl.engines import DeviceLane, EngineConfig, TorchChatEngine
from vla_rl.envs.libero.request_env import list_facts, make_sentence
from vla_rl.envs.libero.requests import Request, Split, draw_requests
from vla_rl.envs.libero.task_files import read_goals
from vla_rl.envs.libero.tasks import find_task, list_tasks
from vla_rl.models.language import load_language_model
from vla_rl.models.shipped import GOAL_PLANNER
from vla_rl.recipes.request_plans import SCENE_TASK, SUITE, change_facts
from vla_rl.rollout import EngineTeam, PlannerConfig, planner_agent
from vla_rl.rollout.planner_agent import PLANNER, ROBOT
from vla_rl.types import (
    ActionChunk,
    ChunkOutcome,
    EnvSpec,
    EpisodeSpec,
    Info,
    Observation,
    Sampling,
    derive_seed,
)

SPLITS: Final[tuple[Split, ...]] = ("train", "combinations", "wordings")
NUM_REQUESTS: Final = 100
"""Requests of each kind."""

MAX_REPLY: Final = 160
"""Tokens of a reply, as in `grpo_planner`."""


class WordScene:
    """A scene and a robot in one, in which every call does at once what it says."""

    def __init__(self, episode: EpisodeSpec, request: Request) -> None:
        self.episode, self._request = episode, request
        self._goals = {task.instruction: read_goals(task.goal_file) for task in list_tasks(SUITE)}
        self._facts = list_facts(find_task(SUITE, SCENE_TASK))
        self._holds: list[list[str]] = []
        self._came_true: list[list[str]] = []
        """Facts in the order in which they came true last."""
        self._instruction = ""

    async def reset(self) -> tuple[Observation, Info]:
        """Begin, with nothing done."""
        return {"state": np.zeros(1, np.float32)}, self._info()

    async def act(self, observation: Observation, sampling: Sampling | None = None) -> ActionChunk:
        """Remember what is asked for; it is done by the step that follows."""
        self._instruction = observation["instruction"]
        zeros = np.zeros(1, np.float32)
        return ActionChunk(
            actions=np.zeros((1, 7), np.float32), tokens=zeros, log_probs=zeros, weight_version=0
        )

    async def step_chunk(
        self, actions: np.ndarray, *, frames_every: int | None = None
    ) -> ChunkOutcome:
        """Do what was asked for."""
        goals = self._goals[self._instruction]
        self._came_true += [goal for goal in goals if goal not in self._holds]
        self._holds = change_facts(self._holds, goals)
        return ChunkOutcome(
            observation={"state": np.zeros(1, np.float32)},
            rewards=np.zeros(1, np.float32),
            terminated=False,
            truncated=False,
            info=self._info(),
        )

    def _info(self) -> Info:
        return {
            "request": self._request.request,
            "scene": [make_sentence(fact) for fact in self._facts if fact in self._holds],
            "skills": list(self._goals),
            "is_success": self._is_fulfilled(),
        }

    def _is_fulfilled(self) -> bool:
        goals, forbidden = (
            [predicate.split() for predicate in predicates]
            for predicates in (self._request.goals, self._request.forbidden)
        )
        if any(goal not in self._holds for goal in goals):
            return False
        if any(each in self._holds for each in forbidden):
            return False
        # what was undone and done again came true where it was done again
        last = [len(self._came_true) - self._came_true[::-1].index(goal) for goal in goals]
        return not self._request.in_order or last == sorted(last)


async def run_requests(folder: str, requests: Sequence[Request], sampling: Sampling) -> str:
    """Return the outcome of each request, 1 if a planner fulfils it. Raises: as `load_language_model`."""

    async def run(number: int, request: Request) -> str:
        episode = EpisodeSpec(
            episode_id=number, group_id=number, member=0, env=EnvSpec(id="words"), task=request.task,
            seed=number, policy_seed=derive_seed(0, number), sampling=sampling,
        )  # fmt: skip
        scene: Any = WordScene(episode, request)
        policies: Any = EngineTeam({PLANNER: chat, ROBOT: scene}).make_policies(episode)
        async with running:
            ended = await planner_agent(scene, policies, planner=PlannerConfig(max_reply=MAX_REPLY))
        return str(int(ended.is_success))

    config, running = EngineConfig(max_batch=16, max_reply=MAX_REPLY), asyncio.Semaphore(16)
    planner = load_language_model(folder)
    async with DeviceLane(num_threads=1) as lane, TorchChatEngine(planner, lane, config) as chat:
        return "".join(await asyncio.gather(*(run(*each) for each in enumerate(requests))))


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        "planner_words", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("planners", nargs="*", type=Path, default=[GOAL_PLANNER], metavar="FOLDER")
    parser.add_argument("--num", type=int, default=NUM_REQUESTS, help="requests of each kind")
    options = parser.parse_args(words)
    rates: dict[str, list[Any]] = {"planner": [str(each) for each in options.planners]}
    rows = [[str(each)] for each in options.planners]
    for planner, row in zip(options.planners, rows, strict=True):
        for split in SPLITS:
            requests = draw_requests(split, options.num)
            for ending, is_greedy in (("", False), ("_likeliest", True)):
                sampling = Sampling(greedy=is_greedy)
                outcomes = asyncio.run(run_requests(str(planner), requests, sampling))
                rates.setdefault(f"{split}{ending}", []).append(percent(outcomes))
                row.append(format_rate(outcomes, 0))
    titles = [
        f"{split}, {how}" for split in SPLITS for how in ("by samples", "by likeliest tokens")
    ]
    print_rows(["planner", *titles], rows)
    print_json_line(rates)
    return 0


if __name__ == "__main__":
    sys.exit(main())
