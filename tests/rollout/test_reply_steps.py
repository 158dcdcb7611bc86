"""A reply becomes one decision, with what a learner needs to compute its log-probs again."""

import msgspec
import numpy as np

from vla_rl.rollout.chat_agent import make_reply_step
from vla_rl.types import Completion, Message

REPLY = Completion(
    message=Message(role="assistant", content="4"),
    prompt_tokens=np.array([1, 2]),
    tokens=np.array([3, 4, 5]),
    log_probs=np.array([-0.1, -0.2, -0.3], np.float32),
    weight_versions=np.array([7, 6, 8]),
    finish_reason="stop",
    temperature=0.7,
)


def test_the_prompt_is_the_observation_and_the_reply_the_action() -> None:
    step = make_reply_step(REPLY, "solver", reward=0.5)
    assert step.agent == "solver"
    assert step.rewards.dtype == np.float32
    assert step.rewards.tolist() == [0.5]
    assert step.observation.keys() == {"prompt_tokens"}
    assert step.observation["prompt_tokens"].tolist() == [1, 2]
    assert step.chunk.actions.tolist() == [[3, 4, 5]]
    assert step.chunk.log_probs.tolist() == REPLY.log_probs.tolist()
    assert step.chunk.temperature == 0.7


def test_a_reply_is_as_stale_as_its_oldest_token() -> None:
    chunk = make_reply_step(REPLY, "solver", reward=0.0).chunk
    assert chunk.weight_version == 6
    assert chunk.weight_versions is not None
    assert chunk.weight_versions.tolist() == [7, 6, 8]


def test_the_grammar_that_restricted_sampling_is_observed_too() -> None:
    restricted = msgspec.structs.replace(REPLY, grammar='start: "4"')
    assert make_reply_step(restricted, "solver", 0.0).observation["grammar"] == 'start: "4"'
