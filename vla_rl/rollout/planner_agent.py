"""The agent in which a planner calls a robot's policy as a tool, within one episode of one environment.

    reset ─► planner ─► do("open the drawer", 100) ─► robot, robot, ... ─► what is seen ─► planner ─► ... ─► finish

The planner, a language policy, reads the request, the scene in words and what happened so far. The robot's
policy reads images and the planner's words instead of the environment's instruction. All control steps run
in the same episode. The trajectory has the decisions of both, in order: a reply of "planner", then the
action chunks of "robot" in the call that it made.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
import numpy as np

from vla_rl.errors import ActorDied, ConfigError, EnvError
from vla_rl.rollout.agents import copy_arrays, copy_chunk
from vla_rl.rollout.chat_agent import ChatLimits, chat_agent
from vla_rl.types import (
    ANY_REPLY,
    ChunkOutcome,
    Config,
    Env,
    EpisodeSpec,
    Info,
    LanguagePolicy,
    Message,
    Observation,
    Policy,
    PositiveFloat,
    PositiveInt,
    ReplyOptions,
    Step,
    TextOutcome,
    TextStart,
    ToolCall,
    ToolRule,
    ToolSpec,
    Trajectory,
)
from vla_rl.util.foreign_data import require_text
from vla_rl.util.values import excerpt

PLANNER: Final = "planner"
ROBOT: Final = "robot"
DO: Final = "do"
FINISH: Final = "finish"

MAX_INSTRUCTION: Final = 200
"""Characters of an instruction; the prompts of robot policies have room for a sentence or two."""

WITHOUT_LIMIT_S: Final = 86_400.0
"""A day: longer than any call of a simulator that its pool does not end."""

MANUAL: Final = (
    "You direct a robot. Call do with one instruction at a time, then look at the scene. "
    "Call finish once the request is fulfilled."
)


class PlannerConfig(Config, frozen=True, kw_only=True):
    """Rules for a planner's replies, and the limits at which its episode is cut off."""

    max_turns: PositiveInt = 8
    """Most replies of the planner in an episode; one that has not finished by then is cut off unsolved."""

    max_call_steps: PositiveInt = 150
    """Most control steps of one call. A call that asks for more runs these, and its
    answer says so."""

    replies: Literal["calls", "free"] = "calls"
    """calls: sampling is restricted to one call with arguments that fit. free: the planner writes what it
    likes; a faulty call is answered with its error, and a reply without a call ends the episode."""

    instructions: Literal["skills", "any"] = "skills"
    """skills: the instructions that the environment names (`info["skills"]`) and no others; any: any words."""

    robot_by_mean: bool | None = None
    """Whether the robot acts by the means of its tokens (`Sampling.by_mean`), not by samples: for a policy such as
    OpenVLA-OFT with tokens that does not learn, or is evaluated. None: no; `grpo_planner` decides by what learns."""

    max_tokens: PositiveInt | None = None
    """Most tokens of all replies of an episode together. None: no limit."""

    max_reply: PositiveInt | None = None
    """Most tokens of one reply; None: the engine's own limit."""

    reply_timeout_s: PositiveFloat | None = None
    """Most seconds for one reply, as in `ChatLimits`. None: no limit."""

    @property
    def chat(self) -> ChatLimits:
        """The same limits for the conversation."""
        return ChatLimits(
            max_turns=self.max_turns,
            max_tokens=self.max_tokens,
            max_reply=self.max_reply,
            reply_timeout_s=self.reply_timeout_s,
            # The simulator's own deadlines bound its reset and a call; others would cancel them half-way.
            reset_timeout_s=WITHOUT_LIMIT_S,
            step_timeout_s=None,
        )


class _DoArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    instruction: str
    max_steps: int | None = None


async def planner_agent(
    env: Env,
    policies: Mapping[str, Any],
    *,
    planner: PlannerConfig | None = None,
    frames_every: int | None = None,
) -> Trajectory:
    """Run one episode of a planner and a robot.

    `info["request"]` of the environment's reset is the request, its observation's instruction where there
    is none; `info["scene"]` is a list of sentences; `info["skills"]` a list of instructions. A call ends
    after its control steps, with the episode, or as soon as the scene has a sentence that it had not when
    the call began. The episode ends when the planner calls `finish`, by a limit, or by the environment.

    Args:
        env: a simulator, leased for the episode.
        policies: the language policy "planner" and the policy "robot".
        planner: limits, and what the planner may write.
        frames_every: as in `embodied_agent`.

    Returns: `Step.agent` tells whose decision each step is. A chunk has the environment's rewards; the
        reply with which the episode ends solved has a reward of 1. `info` is the environment's last, with
        `request` and `calls`: for each reply what was said, run and answered.
    Raises: ConfigError unless both policies are there, or if skills are wanted and the environment names
        none; ActorDied if the simulator dies. A robot policy that dies in a call makes a failed call.
    """
    if not isinstance(policies, Mapping) or not {PLANNER, ROBOT} <= policies.keys():
        names = sorted(policies) if isinstance(policies, Mapping) else "all agents together"
        raise ConfigError(
            f"there are policies for {names}, but a planner's episode needs one for {PLANNER!r} and one "
            f"for {ROBOT!r}; train a Team with these members"
        )
    settings = planner or PlannerConfig()
    episode = _Workplace(env, policies[ROBOT], settings, frames_every)
    speaker: LanguagePolicy = policies[PLANNER]
    said = await chat_agent(episode, {PLANNER: speaker}, limits=settings.chat)
    return episode.join_decisions(said)


class _Workplace:
    """A simulator as the planner's text environment; its tools run the robot's policy."""

    def __init__(
        self, env: Env, robot: Policy, settings: PlannerConfig, frames_every: int | None
    ) -> None:
        self._env, self._robot, self._settings = env, robot, settings
        self._frames_every = frames_every
        self._observation: Observation = {}
        self._info: Info = {}
        self._request = ""
        self._skills: tuple[str, ...] = ()
        self._ran: list[list[Step]] = []
        self._calls: list[dict[str, Any]] = []

    @property
    def episode(self) -> EpisodeSpec:
        return self._env.episode

    async def reset(self) -> TextStart:
        observation, self._info = await self._env.reset()
        self._observation = copy_arrays(observation)
        self._request = require_text(
            self._info.get("request", observation.get("instruction")),
            f"the request of {self.episode.env.id} (`request` in the info of its reset)",
            EnvError,
        )
        if self._settings.instructions == "skills":
            self._skills = self._read_sentences("skills")
            if not self._skills:
                raise ConfigError(
                    f"planner.instructions is 'skills', but {self.episode.env.id} names none in the info "
                    "of its reset (`skills`, a list of instructions); expected 'any' there"
                )
        return TextStart(
            messages=make_question(self._request, self._list_scene()),
            tools=describe_tools(self._skills, self._settings),
            agent=PLANNER,
            options=self._reply_options,
        )

    async def step(self, message: Message) -> TextOutcome:
        """Carry out the first call of a reply; return what is seen after it."""
        self._ran.append([])
        call = message.tool_calls[0] if message.tool_calls else None
        is_finished = call is not None and call.name == FINISH
        # Half a call is a mistake to be told of; a text alone is the planner's last word.
        if is_finished or not (message.tool_calls or message.call_errors):
            self._note_call("", FINISH, "")
            return self._end(terminated=True)
        outcome, answer = None, ""
        if call is not None:
            outcome, answer = await self._answer_call(call)
        answers = [
            *([] if call is None else [make_answer(call, answer)]),
            *(
                make_answer(each, "error: not run, expected one call in a reply")
                for each in message.tool_calls[1:]
            ),
            *(Message(role="tool", content=f"error: {error}") for error in message.call_errors),
        ]
        if call is None:
            self._note_call(message.content, "", answers[0].content)
        if outcome is not None and (outcome.terminated or outcome.truncated):
            return self._end(terminated=outcome.terminated)
        return TextOutcome(
            messages=tuple(answers),
            reward=0.0,
            terminated=False,
            truncated=False,
            # Without `is_success`: an episode that is cut off here has not been finished.
            info={key: value for key, value in self._info.items() if key != "is_success"},
            agent=PLANNER,
            options=self._reply_options,
        )

    def join_decisions(self, said: Trajectory) -> Trajectory:
        """Return the planner's trajectory with the robot's decisions between its turns."""
        steps: list[Step] = []
        for reply, ran in zip(said.steps, self._ran, strict=True):
            steps += [reply, *ran]
        images = {
            name: value
            for name, value in self._observation.items()
            if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3
        }
        # What the agent that decided last would see next; a planner's has the images for videos alone.
        final = (
            {**said.final_observation, **images}
            if steps[-1].agent == PLANNER
            else self._observation
        )
        about = {"request": self._request, "calls": self._calls}
        return msgspec.structs.replace(
            said, steps=tuple(steps), final_observation=final, info={**said.info, **about}
        )

    async def _answer_call(self, call: ToolCall) -> tuple[ChunkOutcome | None, str]:
        """Run a call; return the environment's last outcome, if any, and the answer in words."""
        found = self._read_arguments(call)
        if isinstance(found, str):
            self._note_call(call.arguments, call.name, found)
            return None, found
        most = self._settings.max_call_steps
        wanted = most if found.max_steps is None else found.max_steps
        outcome, fault = await self._act(found.instruction, min(wanted, most))
        num_steps = sum(step.num_executed for step in self._ran[-1])
        parts = [
            f"ran {num_steps} steps" + (f" of {most}, the most" if wanted > most else "") + "."
        ]
        parts += [fault] if fault else []
        answer = " ".join([*parts, *self._list_scene()])
        self._note_call(found.instruction, call.name, answer)
        return outcome, answer

    async def _act(self, instruction: str, max_steps: int) -> tuple[ChunkOutcome | None, str]:
        """Run the robot's policy; return the last outcome, and what went wrong."""
        seen_before = set(self._list_scene())
        sampling = self.episode.sampling if self._settings.robot_by_mean else None
        if sampling is not None:
            sampling = msgspec.structs.replace(sampling, greedy=True, by_mean=True)
        outcome, left = None, max_steps
        while left > 0:
            observed = {**self._observation, "instruction": instruction}
            try:
                chunk = await self._robot.act(observed, sampling)
            except (ActorDied, ConnectionError) as error:
                # The simulator is as it was: the episode goes on, and the planner may try again.
                return outcome, f"error: the robot stopped ({type(error).__name__})."
            outcome = await self._env.step_chunk(
                chunk.actions[:left], frames_every=self._frames_every
            )
            self._observation = copy_arrays(outcome.observation)
            self._info = copy_arrays(outcome.info)
            self._ran[-1].append(
                Step(
                    observation=observed,
                    chunk=copy_chunk(chunk),
                    rewards=np.array(outcome.rewards),
                    frames=copy_arrays(outcome.frames),
                    frames_key=outcome.frames_key,
                    agent=ROBOT,
                )
            )
            left -= len(outcome.rewards)
            is_over = outcome.terminated or outcome.truncated
            if is_over or set(self._list_scene()) - seen_before:
                break
        return outcome, ""

    def _read_arguments(self, call: ToolCall) -> "_DoArguments | str":
        """Return the arguments of a call, or the error in words."""
        if call.name != DO:
            return f"error: there is no tool {excerpt(call.name)}; expected {DO!r} or {FINISH!r}"
        try:
            found = msgspec.json.decode(call.arguments, type=_DoArguments)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            return f"error: wrong arguments: {excerpt(str(error))}"
        if found.max_steps is not None and found.max_steps < 1:
            return f"error: max_steps is {found.max_steps}, expected at least 1"
        if self._skills:
            # What the environment names is an instruction, however long it is.
            if found.instruction in self._skills:
                return found
            return f"error: no instruction {excerpt(found.instruction)}, expected one of the tool's"
        if not 0 < len(found.instruction.strip()) <= MAX_INSTRUCTION:
            return (
                f"error: the instruction has {len(found.instruction)} characters, expected 1 to "
                f"{MAX_INSTRUCTION}"
            )
        return found

    @property
    def _reply_options(self) -> ReplyOptions:
        if self._settings.replies == "free":
            return ANY_REPLY
        return ReplyOptions(tools=ToolRule(mode="required", max_calls=1))

    def _list_scene(self) -> Sequence[str]:
        return self._read_sentences("scene")

    def _read_sentences(self, name: str) -> tuple[str, ...]:
        value = self._info.get(name, ())
        what = f"info[{name!r}] of {self.episode.env.id}"
        # One text is a sequence too, of its letters.
        if not isinstance(value, list | tuple | np.ndarray):
            raise EnvError(
                f"{what} is {excerpt(value)}, a {type(value).__name__}, expected a list of sentences"
            )
        return tuple(str(require_text(each, f"a sentence in {what}", EnvError)) for each in value)

    def _note_call(self, said: str, tool: str, answer: str) -> None:
        num_steps = sum(step.num_executed for step in self._ran[-1])
        self._calls.append({"tool": tool, "said": said, "num_steps": num_steps, "answer": answer})

    def _end(self, *, terminated: bool) -> TextOutcome:
        is_success = bool(self._info.get("is_success", False))
        return TextOutcome(
            messages=(),
            reward=float(is_success),
            terminated=terminated,
            truncated=not terminated,
            info={**self._info, "is_success": is_success},
            agent=PLANNER,
        )


def make_question(request: str, scene: Sequence[str]) -> tuple[Message, ...]:
    """Return the messages with which a planner's episode begins: the rules, then request and scene in words."""
    asked = " ".join([request, *scene])
    return Message(role="system", content=MANUAL), Message(role="user", content=asked)


def make_answer(call: ToolCall, text: str) -> Message:
    """Return the answer to a call."""
    return Message(role="tool", content=text, tool_call_id=call.id, name=call.name)


def describe_tools(skills: Sequence[str], settings: PlannerConfig) -> tuple[ToolSpec, ...]:
    """Return the two tools; without skills any instruction may be given."""
    words: dict[str, Any] = {"type": "string"}
    words |= {"enum": list(skills)} if skills else {"maxLength": MAX_INSTRUCTION}
    steps = {"type": "integer", "minimum": 1, "maximum": settings.max_call_steps}
    is_strict = settings.replies == "calls"
    return (
        ToolSpec(
            name=DO,
            description="Let the robot follow one instruction.",
            parameters={
                "type": "object",
                "properties": {"instruction": words, "max_steps": steps},
                "required": ["instruction"],
                "additionalProperties": False,
            },
            is_strict=is_strict,
        ),
        ToolSpec(
            name=FINISH,
            description="End: the request is fulfilled.",
            parameters={"type": "object", "properties": {}, "additionalProperties": False},
            is_strict=is_strict,
        ),
    )
