"""A planner calls a robot's policy as a tool: what it may write, and every way in which a call goes wrong."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from vla_rl.errors import ActorDied, ConfigError, EnvError
from vla_rl.rollout import PlannerConfig, planner_agent
from vla_rl.types import (
    ANY_REPLY,
    ActionChunk,
    ChunkOutcome,
    Completion,
    EnvSpec,
    EpisodeSpec,
    Info,
    Message,
    Observation,
    ReplyOptions,
    Sampling,
    StopReason,
    ToolCall,
    ToolSpec,
    Trajectory,
)

EPISODE = EpisodeSpec(
    episode_id=3, group_id=0, member=0, env=EnvSpec(id="lamps"), task="lamps", seed=0, policy_seed=7
)
SKILLS = ("light the red lamp", "light the green lamp", "wait")


class Lamps:
    """Two lamps in one episode; an action of value k lights lamp k at its second control step in a row."""

    episode = EPISODE

    def __init__(
        self,
        dies_at: int | None = None,
        skills: Sequence[str] = SKILLS,
        info: Info | None = None,
    ) -> None:
        self.lit, self.num_steps, self.dies_at, self.skills = set[int](), 0, dies_at, list(skills)
        self.info = info or {}
        self._image = np.zeros((4, 4, 3), np.uint8)

    def _info(self) -> Info:
        return {
            "request": "light both lamps",
            "scene": [f"Lamp {lamp} is lit." for lamp in sorted(self.lit)],
            "skills": self.skills,
            "is_success": self.lit == {0, 1},
            **self.info,
        }

    def _observe(self) -> Observation:
        return {"image": self._image, "instruction": "none"}

    async def reset(self) -> tuple[Observation, Info]:
        return self._observe(), self._info()

    async def step_chunk(
        self, actions: np.ndarray, *, frames_every: int | None = None
    ) -> ChunkOutcome:
        rewards = []
        for action in actions:
            self.num_steps += 1
            if self.num_steps == self.dies_at:
                raise ActorDied("simulator", 0, "SIGKILL")
            self._image[:] = self.num_steps  # memory that the next step overwrites
            lamp = int(action[0])
            is_new = self.num_steps % 2 == 0 and lamp < 2 and lamp not in self.lit
            self.lit |= {lamp} if is_new else set()
            rewards.append(0.5 * is_new)
        return ChunkOutcome(
            observation=self._observe(),
            rewards=np.array(rewards, np.float32),
            terminated=False,
            truncated=self.num_steps >= 40,
            info=self._info(),
        )


class Robot:
    """Acts for the skill that it is told, two control steps at a time; may die at a decision."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.told: list[str] = []
        self.samplings: list[Sampling | None] = []
        self.dies_at = dies_at

    async def act(self, observation: Observation, sampling: Sampling | None = None) -> ActionChunk:
        self.told.append(observation["instruction"])
        self.samplings.append(sampling)
        if len(self.told) == self.dies_at:
            raise ActorDied("engine", 0, "SIGKILL")
        known = SKILLS.index(observation["instruction"]) if self.told[-1] in SKILLS else 2
        return ActionChunk(
            actions=np.full((2, 1), known, np.float32),
            tokens=np.zeros(2, np.int64),
            log_probs=np.zeros(2, np.float32),
            weight_version=0,
        )


class Planner:
    """Says one reply after the other, the last one for ever; remembers what it received."""

    def __init__(self, *replies: Message) -> None:
        self.replies, self.received = list(replies), list[list[str]]()
        self.tools: Sequence[ToolSpec] = ()
        self.options = ANY_REPLY

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        options: ReplyOptions = ANY_REPLY,
    ) -> Completion:
        self.received.append([message.content for message in messages])
        self.tools, self.options = tools, options
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return Completion(
            message=reply,
            prompt_tokens=np.arange(len(messages)),
            tokens=np.array([1, 2]),
            log_probs=np.zeros(2, np.float32),
            weight_versions=np.zeros(2, np.int64),
            finish_reason="stop",
        )


def call(name: str, **arguments: Any) -> Message:
    made = ToolCall(id="call_0", name=name, arguments=json.dumps(arguments))
    return Message(role="assistant", tool_calls=(made,))


RED, GREEN = call("do", instruction=SKILLS[0]), call("do", instruction=SKILLS[1])
FINISH = call("finish")


async def run(
    *replies: Message, env: Lamps | None = None, robot: Robot | None = None, **settings: Any
) -> tuple[Trajectory, Planner]:
    planner = Planner(*replies)
    policies: Mapping[str, Any] = {"planner": planner, "robot": robot or Robot()}
    made = await planner_agent(env or Lamps(), policies, planner=PlannerConfig(**settings))  # type: ignore[arg-type]
    return made, planner


@pytest.mark.parametrize("by_mean", [True, False, None])
async def test_a_robot_acts_by_means_if_they_are_wanted(by_mean: bool | None) -> None:
    robot = Robot()
    await run(RED, FINISH, robot=robot, robot_by_mean=by_mean)
    expected = Sampling(greedy=True, by_mean=True) if by_mean else None
    assert robot.samplings
    assert all(sampling == expected for sampling in robot.samplings)


async def test_one_trajectory_has_the_decisions_of_both_in_their_order() -> None:
    robot = Robot()
    trajectory, planner = await run(RED, GREEN, FINISH, robot=robot)
    assert [step.agent for step in trajectory.steps] == [
        "planner", "robot", "planner", "robot", "planner",
    ]  # fmt: skip
    assert trajectory.stop_reason is StopReason.SUCCESS
    assert trajectory.returns_by_agent == {"planner": 1.0, "robot": 1.0}
    assert [step.rewards.tolist() for step in trajectory.steps] == [
        [0.0], [0.0, 0.5], [0.0], [0.0, 0.5], [1.0],
    ]  # fmt: skip
    assert robot.told == [SKILLS[0], SKILLS[1]]
    assert trajectory.steps[1].observation["instruction"] == SKILLS[0]
    assert planner.received[-1][-1] == "ran 2 steps. Lamp 0 is lit. Lamp 1 is lit."
    assert planner.received[0][-1] == "light both lamps"


async def test_what_the_robot_saw_is_a_copy_and_the_last_image_is_kept_for_videos() -> None:
    trajectory, _ = await run(RED, GREEN, FINISH)
    seen = [step.observation["image"] for step in trajectory.steps if step.agent == "robot"]
    assert [int(image[0, 0, 0]) for image in seen] == [0, 2]
    assert int(trajectory.final_observation["image"][0, 0, 0]) == 4


async def test_a_call_ends_after_its_control_steps_exactly() -> None:
    waiting = call("do", instruction="wait", max_steps=5)
    trajectory, planner = await run(waiting, FINISH)
    steps = [len(step.rewards) for step in trajectory.steps if step.agent == "robot"]
    assert steps == [2, 2, 1]
    assert planner.received[-1][-1] == "ran 5 steps."
    assert trajectory.stop_reason is StopReason.TERMINATED


async def test_finishing_at_once_is_an_episode_without_a_decision_of_the_robot() -> None:
    trajectory, _ = await run(FINISH)
    assert [step.agent for step in trajectory.steps] == ["planner"]
    assert trajectory.stop_reason is StopReason.TERMINATED


async def test_a_planner_that_never_ends_is_cut_off_and_has_not_solved_its_request() -> None:
    trajectory, _ = await run(RED, GREEN, call("do", instruction="wait", max_steps=2), max_turns=5)
    assert trajectory.stop_reason is StopReason.TURN_LIMIT
    assert trajectory.info["is_success"] is False
    assert sum(step.agent == "planner" for step in trajectory.steps) == 5


async def test_a_billion_control_steps_are_the_most_of_one_call() -> None:
    trajectory, planner = await run(
        call("do", instruction="wait", max_steps=10**9), FINISH, max_call_steps=6
    )
    assert trajectory.num_env_steps - 2 == 6  # two replies of the planner count as one each
    assert planner.received[-1][-1] == "ran 6 steps of 6, the most."


async def test_the_simulators_own_limit_ends_the_episode_in_the_middle_of_a_call() -> None:
    trajectory, _ = await run(call("do", instruction="wait", max_steps=100))
    assert trajectory.stop_reason is StopReason.TIME_LIMIT
    assert trajectory.steps[-1].agent == "robot"
    assert "prompt_tokens" not in trajectory.final_observation


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (call("fly", instruction="wait"), "no tool 'fly'; expected 'do' or 'finish'"),
        (call("do", instruction="bitte warten"), "no instruction 'bitte warten'"),
        (call("do", instruction="wait", max_steps=0), "max_steps is 0, expected at least 1"),
        (call("do", instruction="wait", max_steps="all"), "wrong arguments"),
        (call("do", steps=3), "wrong arguments"),
        (Message(role="assistant", content="<tool", call_errors=("it is no JSON",)), "no JSON"),
    ],
)
async def test_a_faulty_call_is_told_of_and_the_episode_goes_on(reply: Message, told: str) -> None:
    trajectory, planner = await run(reply, RED, GREEN, FINISH, replies="free")
    assert told in planner.received[1][-1]
    assert trajectory.is_success
    assert told in trajectory.info["calls"][0]["answer"]


async def test_instructions_in_any_words_reach_the_robot_unless_they_are_too_long() -> None:
    robot = Robot()
    _, planner = await run(
        call("do", instruction="x" * 5000),
        call("do", instruction="空の皿を置いて", max_steps=2),
        FINISH,
        robot=robot,
        instructions="any",
    )
    assert robot.told == ["空の皿を置いて"]
    assert "5000 characters, expected 1 to 200" in planner.received[1][-1]


async def test_of_two_calls_in_a_turn_the_first_one_runs_and_each_is_answered() -> None:
    both = Message(role="assistant", tool_calls=RED.tool_calls + GREEN.tool_calls)
    robot = Robot()
    _, planner = await run(both, FINISH, robot=robot, replies="free")
    assert robot.told == [SKILLS[0]]
    assert planner.received[-1][-2:] == [
        "ran 2 steps. Lamp 0 is lit.", "error: not run, expected one call in a reply",
    ]  # fmt: skip


async def test_a_robot_policy_that_dies_in_a_call_is_a_failed_call_and_no_lost_episode() -> None:
    waiting = call("do", instruction="wait", max_steps=8)
    trajectory, planner = await run(waiting, RED, GREEN, FINISH, robot=Robot(dies_at=3))
    assert planner.received[1][-1] == "ran 4 steps. error: the robot stopped (ActorDied)."
    assert trajectory.is_success


async def test_a_simulator_that_dies_in_a_call_loses_the_episode() -> None:
    with pytest.raises(ActorDied, match="simulator"):
        await run(call("do", instruction="wait"), env=Lamps(dies_at=3))


async def test_a_text_alone_ends_the_episode_where_replies_are_free() -> None:
    trajectory, _ = await run(RED, GREEN, Message(role="assistant", content="done"), replies="free")
    assert trajectory.is_success


async def test_replies_are_restricted_to_calls_unless_they_are_free() -> None:
    _, strict = await run(FINISH)
    assert all(tool.is_strict for tool in strict.tools)
    assert strict.options.tools.mode == "required"
    assert strict.tools[0].parameters["properties"]["instruction"]["enum"] == list(SKILLS)
    _, free = await run(FINISH, replies="free")
    assert free.options == ANY_REPLY


async def test_both_policies_and_the_skills_are_required_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="needs one for 'planner' and one for 'robot'"):
        await planner_agent(Lamps(), {"planner": Planner(FINISH)})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="names none in the info"):
        await run(FINISH, env=Lamps(skills=()))


@pytest.mark.parametrize("value", ["One lamp is lit.", None])
@pytest.mark.parametrize("name", ["scene", "skills"])
async def test_one_text_or_none_where_the_environment_owes_a_list_is_refused(
    name: str, value: str | None
) -> None:
    with pytest.raises(EnvError, match=rf"info\['{name}'\] of lamps is .* expected a list"):
        await run(FINISH, env=Lamps(info={name: value}))


async def test_a_skill_that_the_environment_names_may_be_longer_than_other_instructions() -> None:
    robot, skill = Robot(), "wait " * 60
    await run(call("do", instruction=skill), FINISH, env=Lamps(skills=(skill,)), robot=robot)
    assert robot.told[0] == skill
