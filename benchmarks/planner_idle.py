"""How long leased environments wait for a planner's replies, with many episodes at the same time."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from vla_rl.engines import DeviceLane, EngineConfig, TorchChatEngine
from vla_rl.models.language import load_language_model
from vla_rl.models.shipped import GOAL_PLANNER
from vla_rl.rollout import EngineTeam, PlannerConfig, planner_agent
from vla_rl.rollout.planner_agent import DO, PLANNER, ROBOT
from vla_rl.types import (
    ANY_REPLY,
    ActionChunk,
    ChunkOutcome,
    Completion,
    EnvSpec,
    EpisodeSpec,
    Info,
    LanguagePolicy,
    Message,
    Observation,
    Prompt,
    ReplyOptions,
    Sampling,
    ToolCall,
    ToolSpec,
    derive_seed,
)

STEP_S: Final = 0.015
CHUNK: Final = 8
CALL_STEPS: Final = 100
"""Control steps of each call, as many as a skill of LIBERO takes."""

REPLY_TOKENS: Final = 32
"""Tokens of each reply, as many as a call has with a tokenizer that knows its words."""

SKILLS: Final = tuple(f"put the bowl on the {fixture}" for fixture in ("stove", "plate", "cabinet"))


class SleepingEnv:
    """An environment whose control steps take time and change nothing."""

    def __init__(self, episode: EpisodeSpec) -> None:
        self.episode = episode
        self._num_steps = 0

    async def reset(self) -> tuple[Observation, Info]:
        """Begin the episode."""
        return {"state": np.zeros(1, np.float32)}, self._info()

    async def step_chunk(
        self, actions: np.ndarray, *, frames_every: int | None = None
    ) -> ChunkOutcome:
        """Wait as long as the rows take."""
        await asyncio.sleep(STEP_S * len(actions))
        self._num_steps += len(actions)
        return ChunkOutcome(
            observation={"state": np.zeros(1, np.float32)},
            rewards=np.zeros(len(actions), np.float32),
            terminated=False,
            truncated=self._num_steps >= 600,
            info=self._info(),
        )

    def _info(self) -> Info:
        scene = ["The bowl is on the table.", "The bottle is on the table.", "The stove is off."]
        return {"request": "put the bowl away", "scene": scene, "skills": list(SKILLS)}


class StillRobot:
    """An engine that answers at once."""

    weight_version = 0

    async def act(self, observation: Observation, sampling: Sampling) -> ActionChunk:
        """Return a chunk that moves nothing."""
        return ActionChunk(
            actions=np.zeros((CHUNK, 7), np.float32),
            tokens=np.zeros(CHUNK, np.int64),
            log_probs=np.zeros(CHUNK, np.float32),
            weight_version=0,
        )


class TimedPlanner:
    """A policy that counts the seconds in which its replies are waited for.

    What it asks for is replaced: weights from a random start would end most episodes at once.
    """

    def __init__(self, policy: LanguagePolicy) -> None:
        self._policy, self.seconds = policy, 0.0

    async def generate(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[ToolSpec] = (),
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        options: ReplyOptions = ANY_REPLY,
    ) -> Completion:
        """Reply."""
        started = time.perf_counter()
        reply = await self._policy.generate(
            prompt, tools=tools, sampling=sampling, max_tokens=max_tokens, options=options
        )
        self.seconds += time.perf_counter() - started
        arguments = json.dumps({"instruction": SKILLS[0], "max_steps": CALL_STEPS})
        call = ToolCall(id=f"call_{len(prompt)}", name=DO, arguments=arguments)
        message = Message(role="assistant", tool_calls=(call,))
        return msgspec.structs.replace(reply, message=message)


async def measure_idle_share(num_episodes: int) -> float:
    """Return the share of the environments' time in which their episode waits for the planner."""
    model = load_language_model(str(GOAL_PLANNER))
    waited = leased = 0.0

    async def run(number: int, team: EngineTeam) -> None:
        nonlocal waited, leased
        spec = EpisodeSpec(
            episode_id=number, group_id=number, member=0, env=EnvSpec(id="sleeping"), task="idle",
            seed=number, policy_seed=derive_seed(0, number),
        )  # fmt: skip
        policies: Any = team.make_policies(spec)
        planner = TimedPlanner(policies[PLANNER])
        started = time.perf_counter()
        await planner_agent(
            SleepingEnv(spec),  # type: ignore[arg-type]  # it has no single steps
            {PLANNER: planner, ROBOT: policies[ROBOT]},
            planner=PlannerConfig(max_turns=4, max_reply=REPLY_TOKENS),
        )
        leased += time.perf_counter() - started
        waited += planner.seconds

    async with (
        DeviceLane(num_threads=1) as lane,
        TorchChatEngine(model, lane, EngineConfig(max_batch=16, kept_conversations=32)) as chat,
    ):
        team = EngineTeam({PLANNER: chat, ROBOT: StillRobot()})
        await run(num_episodes, team)  # compiles grammars, and fills caches
        waited = leased = 0.0
        async with asyncio.TaskGroup() as tasks:
            for number in range(num_episodes):
                tasks.create_task(run(number, team), name=f"episode {number}")
    return waited / leased
