"""The embodied agent: what it asks for, what it records, and that it owns what it records."""

import asyncio

import numpy as np
import pytest

from vla_rl.rollout import EpisodePolicy, embodied_agent, owned_chunk, owned_copy, stop_reason
from vla_rl.types import (
    ActionChunk,
    ChunkOutcome,
    EnvSpec,
    EpisodeSpec,
    Info,
    Observation,
    Sampling,
    StopReason,
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
    assert [owned_chunk(chunk).temperature for chunk in chunks] == [1.6, 1.0, 1.6]


def test_an_owned_copy_shares_no_array_with_the_original() -> None:
    frame = np.arange(3)
    copied = owned_copy({"a": [frame, (frame, "text")], "n": 1})
    frame[:] = 0
    assert copied["a"][0].tolist() == copied["a"][1][0].tolist() == [0, 1, 2]
    assert copied["a"][1][1] == "text"
