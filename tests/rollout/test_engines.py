"""The policy of an episode refuses what its engine cannot do, with the method to call instead."""

import numpy as np
import pytest

from vla_rl.rollout import EpisodePolicy
from vla_rl.types import ActionChunk, Completion, EnvSpec, EpisodeSpec, Observation, Sampling

EPISODE = EpisodeSpec(
    episode_id=0,
    group_id=0,
    member=0,
    env=EnvSpec(id="none"),
    task="none",
    seed=0,
    policy_seed=0,
)


class Acting:
    weight_version = 0

    async def act(self, observation: Observation, sampling: Sampling) -> ActionChunk:
        return ActionChunk(
            actions=np.zeros((1, 1), np.float32),
            tokens=np.zeros(1, np.int64),
            log_probs=np.zeros(1, np.float32),
            weight_version=0,
        )


class Chatting:
    weight_version = 0

    async def generate(self, *args: object, **kwargs: object) -> Completion:
        raise NotImplementedError


async def test_an_engine_that_chats_is_not_asked_for_actions() -> None:
    with pytest.raises(TypeError, match="generates text and has no `act`; use `generate`"):
        await EpisodePolicy(Chatting(), EPISODE).act({})


async def test_an_engine_that_acts_is_not_asked_for_replies() -> None:
    policy = EpisodePolicy(Acting(), EPISODE)
    with pytest.raises(TypeError, match="does not generate text; use `act`"):
        await policy.generate("hello")
    assert (await policy.act({})).weight_version == 0  # and a refusal takes no decision's seed
