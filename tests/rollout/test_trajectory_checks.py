"""What an agent hands over is held against itself, and its fault is named with decision and field."""

from typing import Any

import msgspec
import numpy as np
import pytest
from rollout_fakes import source

from vla_rl.errors import AgentError
from vla_rl.rollout.agents import check_decisions, check_trajectory
from vla_rl.types import ActionChunk, Step, StopReason, Trajectory

EPISODE = source(1).next_group().episodes[0]
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
        episode=EPISODE,
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
