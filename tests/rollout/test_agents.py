"""The embodied agent owns what it records; what any agent hands over is checked, with decision and field."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from rollout_fakes import source

from vla_rl.errors import AgentError
from vla_rl.rollout import EpisodePolicy, copy_arrays, copy_chunk, embodied_agent, stop_reason
from vla_rl.rollout.agents import check_decisions, check_trajectory
from vla_rl.types import (
    ActionChunk,
    ChunkOutcome,
    EnvSpec,
    EpisodeSpec,
    Info,
    Observation,
    Sampling,
    Step,
    StopReason,
    Trajectory,
    derive_seed,
)

EPISODE = EpisodeSpec(
    episode_id=5,
    group_id=1,
    member=1,
    env=EnvSpec(id="fake-v0"),
    task="t",
    seed=3,
    policy_seed=11,
    sampling=Sampling(temperature=1.6),
)


class OneBufferEnv:
    """Shows every observation in the same memory, as shared memory does.

    Ends in its third chunk, after one row of two.
    """

    def __init__(self, *, success: bool = True) -> None:
        self.episode = EPISODE
        self._frame = np.zeros((2, 2, 3), dtype=np.uint8)
        self._success, self._num_chunks = success, 0
        self.actions: list[float] = []

    async def reset(self) -> tuple[Observation, Info]:
        return self._observe(), {}

    async def step_chunk(
        self, actions: np.ndarray, *, frames_every: int | None = None
    ) -> ChunkOutcome:
        self.actions.append(float(actions[0, 0]))
        self._num_chunks += 1
        frames = None if frames_every is None else self._frame[None].copy()
        is_last = self._num_chunks == 3
        return ChunkOutcome(
            observation=self._observe(),
            rewards=np.array([1.0] if is_last else [0.25, 0.5], dtype=np.float32),
            terminated=is_last and self._success,
            truncated=is_last and not self._success,
            info={"is_success": is_last and self._success},
            frames=frames,
            frames_key="wrist_image",
        )

    def _observe(self) -> Observation:
        self._frame[:] = self._num_chunks
        return {"image": self._frame, "instruction": "go"}


class EchoEngine:
    """Acts by what it sees and notes how it was asked to sample.

    All its chunks are rows of one array.
    """

    weight_version = 4

    def __init__(self) -> None:
        self.samplings: list[Sampling] = []
        self._memory = np.zeros((2, 1), dtype=np.float32)

    async def act(self, observation: Observation, sampling: Sampling) -> ActionChunk:
        self.samplings.append(sampling)
        self._memory[:] = 10 + observation["image"][0, 0, 0]
        return ActionChunk(
            actions=self._memory,
            tokens=np.zeros(2, np.int64),
            log_probs=np.zeros(2, np.float32),
            weight_version=4,
        )


async def test_an_episode_is_recorded_chunk_by_chunk_to_the_very_row_that_ended_it() -> None:
    env = OneBufferEnv()
    async with asyncio.timeout(60):
        trajectory = await embodied_agent(env, EpisodePolicy(EchoEngine(), EPISODE))
    assert env.actions == [10.0, 11.0, 12.0]
    assert [step.num_executed for step in trajectory.steps] == [2, 2, 1]
    assert trajectory.num_env_steps == 5
    assert trajectory.undiscounted_return == 2.5
    assert trajectory.stop_reason is StopReason.SUCCESS
    assert trajectory.info == {"is_success": True}
    assert trajectory.episode == EPISODE


async def test_what_is_recorded_does_not_change_when_the_environment_and_the_engine_reuse_their_memory() -> (
    None
):
    async with asyncio.timeout(60):
        trajectory = await embodied_agent(OneBufferEnv(), EpisodePolicy(EchoEngine(), EPISODE))
    assert [int(step.observation["image"][0, 0, 0]) for step in trajectory.steps] == [0, 1, 2]
    assert int(trajectory.final_observation["image"][0, 0, 0]) == 3
    assert [float(step.chunk.actions[0, 0]) for step in trajectory.steps] == [10.0, 11.0, 12.0]
    assert all(step.observation["image"].flags.owndata for step in trajectory.steps)


async def test_frames_are_kept_with_the_name_of_their_camera() -> None:
    async with asyncio.timeout(60):
        trajectory = await embodied_agent(
            OneBufferEnv(), EpisodePolicy(EchoEngine(), EPISODE), frames_every=2
        )
    assert [step.frames_key for step in trajectory.steps] == ["wrist_image"] * 3
    assert [
        int(step.frames[0, 0, 0, 0]) for step in trajectory.steps if step.frames is not None
    ] == [0, 1, 2]


@pytest.mark.parametrize(
    ("terminated", "info", "expected"),
    [
        (True, {"is_success": True}, StopReason.SUCCESS),
        (True, {"is_success": False}, StopReason.TERMINATED),
        (True, {}, StopReason.TERMINATED),
        (False, {}, StopReason.TIME_LIMIT),
        (False, {"is_success": True}, StopReason.SUCCESS_AT_LIMIT),
    ],
)
def test_success_is_only_what_the_environment_calls_success(
    terminated: bool, info: Info, expected: StopReason
) -> None:
    assert stop_reason(terminated, info) is expected


async def test_decision_k_has_a_seed_of_its_own_whatever_the_timing_and_whoever_chose_the_temperature() -> (
    None
):
    engine = EchoEngine()
    policy = EpisodePolicy(engine, EPISODE)
    observation = {"image": np.zeros((2, 2, 3), dtype=np.uint8)}
    async with asyncio.timeout(60):
        chunks = [
            await policy.act(observation),
            await policy.act(observation, Sampling(greedy=True, seed=99)),
            await policy.act(observation),
        ]
    assert [sampling.seed for sampling in engine.samplings] == [
        derive_seed(11, number) for number in range(3)
    ]
    assert [sampling.temperature for sampling in engine.samplings] == [1.6, 1.0, 1.6]
    assert [copy_chunk(chunk).temperature for chunk in chunks] == [1.6, 1.0, 1.6]


def test_an_owned_copy_shares_no_array_with_the_original() -> None:
    frame = np.arange(3)
    copied = copy_arrays({"a": [frame, (frame, "text")], "n": 1})
    frame[:] = 0
    assert copied["a"][0].tolist() == copied["a"][1][0].tolist() == [0, 1, 2]
    assert copied["a"][1][1] == "text"


CHECKED_EPISODE = source(1).next_group().episodes[0]
IDS = {"policy": range(10, 20), "speaker": range(100)}

CHUNK = ActionChunk(
    actions=np.zeros((2, 3), np.float32),
    tokens=np.arange(10, 16),
    log_probs=np.full(6, -0.5, np.float32),
    weight_version=4,
)
STEP = Step(observation={}, chunk=CHUNK, rewards=np.array([0.0, 1.0], np.float32))


def trajectory(*steps: Any, **fields: Any) -> Trajectory:
    return Trajectory(
        episode=CHECKED_EPISODE,
        steps=steps,
        final_observation={},
        **{"stop_reason": StopReason.SUCCESS, **fields},
    )


def check(trajectory: Trajectory) -> None:
    check_trajectory(trajectory, "episode 7")
    check_decisions(trajectory, "episode 7", IDS.__getitem__)


def with_chunk(**fields: Any) -> Step:
    return msgspec.structs.replace(STEP, chunk=msgspec.structs.replace(CHUNK, **fields))


def with_step(**fields: Any) -> Step:
    return msgspec.structs.replace(STEP, **fields)


def floats(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


FAULTS: dict[str, tuple[Step, str]] = {
    "99 rewards": (with_step(rewards=np.zeros(99)), "99 rewards for 2 control steps"),
    "no reward": (with_step(rewards=floats()), "0 rewards for 2 control steps"),
    "a list of rewards": (
        with_step(rewards=[0.0]),
        r"rewards of a list \[0.0\], expected an array",
    ),
    "rewards by axis": (with_step(rewards=np.zeros((2, 1))), r"rewards of float64 \[2, 1\]"),
    "a NaN reward": (
        with_step(rewards=floats(0.0, np.nan)),
        r"rewards\[1\]=nan, expected a finite",
    ),
    "no chunk": (with_step(chunk=None), "chunk=None, expected the ActionChunk"),
    "another agent": (with_step(agent="nobody"), "agent='nobody', expected the name of an agent"),
    "no actions": (with_chunk(actions=np.zeros((0, 3))), r"chunk.actions of float64 \[0, 3\]"),
    "a list of actions": (with_chunk(actions=[[0.0]]), "chunk.actions of a list"),
    "a large token": (
        with_chunk(tokens=np.array([10, 11, 12 + 10**6, 13, 14, 15])),
        r"chunk.tokens\[2\]=1000012, expected an id that its policy chooses, 10 to 19",
    ),
    "a small token": (
        with_chunk(tokens=np.array([9, 11, 12, 13, 14, 15])),
        r"chunk.tokens\[0\]=9, expected an id that its policy chooses, 10 to 19",
    ),
    "tokens of an odd number": (
        with_chunk(tokens=np.arange(10, 15), log_probs=CHUNK.log_probs[:5]),
        "5 tokens for 2 control steps",
    ),
    "tokens by row": (
        with_chunk(tokens=np.arange(10, 16).reshape(2, 3)),
        r"chunk.tokens of int64 \[2, 3\]",
    ),
    "NaN tokens": (with_chunk(tokens=np.full(6, np.nan)), r"chunk.tokens\[0\]=nan"),
    "fewer log-probs": (
        with_chunk(log_probs=CHUNK.log_probs[:4]),
        "4 chunk.log_probs for 6 tokens",
    ),
    "NaN log-probs": (
        with_chunk(log_probs=floats(-1, -1, np.nan, -1, -1, -1)),
        r"chunk.log_probs\[2\]=nan",
    ),
    "probabilities": (
        with_chunk(log_probs=np.full(6, 0.5, np.float32)),
        r"chunk.log_probs\[0\]=0.5, expected natural logs of probabilities",
    ),
    "a negative version": (with_chunk(weight_version=-1), "chunk.weight_version=a int -1"),
    "a version of text": (with_chunk(weight_version="4"), "chunk.weight_version=a str '4'"),
    "fewer versions": (
        with_chunk(weight_versions=np.array([4])),
        "1 chunk.weight_versions for 6 tokens",
    ),
    "no temperature": (with_chunk(temperature=0.0), "chunk.temperature=0.0"),
    "a NaN temperature": (with_chunk(temperature=float("nan")), "chunk.temperature=nan"),
    "a NaN drawn": (
        with_chunk(drawn={"state_before": floats(0.0, np.nan)}),
        "chunk.drawn=a dict .* expected a dict of arrays of finite numbers",
    ),
    "an intervention too few": (
        with_step(intervened=np.array([True])),
        r"intervened of bool \[1\], expected bool \[2\]",
    ),
    "interventions as numbers": (
        with_step(intervened=np.array([0, 1])),
        r"intervened of int64 \[2\], expected bool \[2\]",
    ),
    "a narrow label": (
        with_step(expert_actions=np.zeros((2, 2), np.float32)),
        r"expert_actions of float32 \[2, 2\], expected float32 \[2, 3\]",
    ),
    "a NaN label": (
        with_step(expert_actions=np.float32([[0, 0, 0], [0, np.nan, 0]])),
        r"expert_actions\[1\]=\[0.0, nan, 0.0\], expected finite",
    ),
    "a drawn number": (with_chunk(drawn={"step": 3}), "chunk.drawn=a dict .*'step': 3"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_episode_decision_and_field(fault: str) -> None:
    step, message = FAULTS[fault]
    with pytest.raises(AgentError, match=f"decision 1 has {message}.*, in episode 7$"):
        check(trajectory(STEP, step, STEP))


def test_every_field_of_a_decision_has_a_fault_or_may_be_anything() -> None:
    free = {"observation", "frames", "frames_key"}  # what the policy saw is the agent's choice
    text = " ".join(message for _, message in FAULTS.values()).replace("\\", "")
    fields = {*Step.__struct_fields__, *ActionChunk.__struct_fields__} - free
    assert {field for field in fields if field not in text} == set()


@pytest.mark.parametrize(
    "step",
    [
        STEP,
        with_step(rewards=floats(1.0)),  # the episode ended in the middle of the chunk
        with_step(rewards=np.array([True])),
        with_chunk(weight_version=np.int64(4), weight_versions=np.full(6, 4), temperature=0.5),
        with_chunk(tokens=np.linspace(-1, 1, 6), log_probs=np.full(6, 2.5)),  # densities
        with_chunk(log_probs=np.zeros(6)),
        # tokens that did not run may have any log-prob
        msgspec.structs.replace(
            with_chunk(log_probs=floats(-1, -1, -1, -np.inf, 9, np.nan)), rewards=floats(1.0)
        ),
        with_step(agent="speaker"),
        with_step(intervened=np.array([False, True]), expert_actions=np.ones((2, 3), np.float32)),
    ],
)
def test_what_fits_passes(step: Step) -> None:
    check(trajectory(step))
    check(trajectory(STEP, step))


def test_what_belongs_to_the_episode_is_checked_too() -> None:
    with pytest.raises(AgentError, match="stop_reason='success' for episode 7, expected a StopR"):
        check(trajectory(STEP, stop_reason="success"))
    with pytest.raises(AgentError, match="info=None for episode 7, expected a dict"):
        check(trajectory(STEP, info=None))


def test_tokens_of_a_policy_that_names_none_are_free() -> None:
    step = with_chunk(tokens=np.array([10**6, -5, 0, 1, 2, 3]))
    check_decisions(trajectory(step), "episode 7", lambda agent: None)
