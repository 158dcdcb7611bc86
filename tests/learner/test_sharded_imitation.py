"""Supervised learning over several ranks is that of one process."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from small_worlds import mlp, state

from benchmarks import conversations
from vla_rl.actors import Runtime
from vla_rl.engines import DeviceLane
from vla_rl.errors import ConfigError
from vla_rl.learner import Demonstration, ImitationConfig, Imitator, OptimizerConfig
from vla_rl.learner.distributed import ShardedImitator
from vla_rl.models.images import AugmentationConfig
from vla_rl.models.language import tiny as tiny_language
from vla_rl.models.language.demonstrations import chat_demonstration
from vla_rl.run.imitation import augmented_batches, seeded_batches, tiny_policy
from vla_rl.run.supervised import opened_imitator
from vla_rl.types import Message

CONFIG = ImitationConfig(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0), micro_batch=2)


def weights(policy: Any) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in policy.network.parameters()])


def shown(number: int) -> Demonstration:
    numbers = np.random.default_rng(number).uniform(-1.0, 1.0, (2, 1)).astype(np.float32)
    return Demonstration(observation=state(number, -number), actions=numbers, num_valid=2)


async def test_two_ranks_imitate_as_one_process_and_the_model_follows_when_asked() -> None:
    alone, shared = mlp(), mlp()
    lessons, before = [shown(number) for number in range(5)], weights(shared)
    async with DeviceLane(1) as lane, asyncio.timeout(200):
        one = Imitator(alone, lane, CONFIG)
        many = msgspec.structs.replace(CONFIG, ranks=2)
        async with opened_imitator(shared, lane, many) as two:
            assert isinstance(two, ShardedImitator)
            for count in (5, 1, 4):  # one row: a rank without any takes part
                reports = [await each.update(lessons[:count]) for each in (one, two)]
                assert reports[1].metrics == pytest.approx(reports[0].metrics, rel=1e-4)
            assert two.weight_version == 3
            assert torch.equal(weights(shared), before)
            await two.fetch()
            assert weights(shared).numpy() == pytest.approx(weights(alone).numpy(), abs=1e-5)
            assert await two.evaluate(lessons) == pytest.approx(await one.evaluate(lessons))
            state = await two.snapshot()
            await two.update(lessons)
            await one.update(lessons)
            assert state.weight_version == 3
            await two.fetch()
    assert weights(shared).numpy() == pytest.approx(weights(alone).numpy(), abs=1e-5)


@pytest.mark.proof
@pytest.mark.parametrize("shard", ["gradients", "weights"])
async def test_conversations_are_learnt_as_in_one_process(shard: str) -> None:
    alone, shared = (tiny_language(conversations.SHAPE, ["a"], seed=0) for _ in range(2))
    said = ["a b", "c", "a a a a"]
    chats = [
        (Message(role="user", content=each), Message(role="assistant", content=each[::-1]))
        for each in said
    ]
    lessons = [chat_demonstration(alone, chat) for chat in chats]
    config = msgspec.structs.replace(CONFIG, ranks=3, shard=shard)
    async with DeviceLane(1) as lane, Runtime() as runtime, asyncio.timeout(250):
        one = Imitator(alone, lane, CONFIG)
        async with ShardedImitator(shared, runtime, lane, config) as three:
            for _ in range(3):
                losses = [
                    (await each.update(lessons)).metrics["imitation/loss"] for each in (one, three)
                ]
                assert losses[1] == pytest.approx(losses[0], rel=1e-5)
            await three.fetch()
    assert weights(shared).numpy() == pytest.approx(weights(alone).numpy(), abs=1e-5)


def test_a_rank_draws_the_same_augmentation_from_the_same_seed() -> None:
    policy = tiny_policy("tokens", None, seed=0)
    frame = np.random.default_rng(0).integers(0, 255, (28, 28, 3), np.uint8)
    cameras = {f"{camera}": frame for camera in policy.config.cameras}
    observations = [{**cameras, "instruction": "reach", "state": np.zeros(8, np.float32)}]
    augment = AugmentationConfig()
    seeded = seeded_batches(policy, msgspec.to_builtins(augment))
    plain = augmented_batches(policy, augment, torch.Generator().manual_seed(7))
    first, again, other = (seeded(observations, seed) for seed in (7, 7, 8))
    expected = plain(observations)
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.images, expected.images)
    assert not torch.equal(first.images, other.images)


def test_what_one_rank_cannot_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="shard is 'weights', expected gradients with one rank"):
        ImitationConfig(shard="weights")
