"""Teams, imitation, flow policies over ranks: what one process learns; deaths that cost no checkpoint."""

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from small_episodes import make_drawing_policy, mlp, run_episodes, state, walk
from small_flow import run_episodes as run_flow_episodes, tiny_policy as tiny_flow_policy

from benchmarks import conversations
from benchmarks.shared_updates import settings
from vla_rl.actors import Runtime
from vla_rl.algorithms import KlLossConfig, PolicyLossConfig
from vla_rl.engines import DeviceLane
from vla_rl.errors import ConfigError, RankFailed
from vla_rl.learner import (
    Critic,
    CriticConfig,
    CriticTeam,
    Demonstration,
    ImitationConfig,
    Imitator,
    Learner,
    LearnerConfig,
    LearnerTeam,
    OptimizerConfig,
    Reference,
    ReferenceTeam,
    TeamState,
    load_checkpoint,
    save_checkpoint,
)
from vla_rl.learner.checkpoint.folders import newest_name
from vla_rl.learner.distributed import ShardedImitator, ShardedLearner
from vla_rl.models.flow.trained_parts import choose_trained
from vla_rl.models.images import AugmentationConfig
from vla_rl.models.language import tiny as tiny_language
from vla_rl.models.language.policy import chat_demonstration
from vla_rl.models.mlp import MlpPolicy
from vla_rl.models.openvla_oft.fine_tuning import tiny_policy
from vla_rl.models.prismatic.config import LoraConfig
from vla_rl.run.imitation import augmented_batches, seeded_batches
from vla_rl.run.supervised import opened_imitator
from vla_rl.types import Message, Trajectory

CRITIC = CriticConfig(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0), epochs=1, micro_batch=2)
ADVANTAGES = (1.0, -0.5)


def policies() -> dict[str, MlpPolicy]:
    return {"left": mlp(0), "right": mlp(1)}


def episodes(of: Mapping[str, MlpPolicy]) -> list[Trajectory]:
    """Two episodes in which both agents decide, one after the other."""
    made = []
    for seed, steps in ((1, 3), (2, 2)):
        parts = [walk(policy, seed, steps) for policy in of.values()]
        decided = [
            msgspec.structs.replace(step, agent=name)
            for name, part in zip(of, parts, strict=True)
            for step in part.steps
        ]
        made.append(msgspec.structs.replace(parts[0], steps=tuple(decided)))
    return made


def weights(of: Mapping[str, MlpPolicy]) -> torch.Tensor:
    return torch.cat(
        [each.detach().flatten() for policy in of.values() for each in policy.network.parameters()]
    )


@pytest.mark.asyncio(loop_scope="session")
async def test_a_team_over_ranks_learns_what_it_learns_in_one_process(
    runtime: Runtime, tmp_path: Path
) -> None:
    alone, shared = policies(), policies()
    trajectories = episodes(alone)
    returns = [np.linspace(-1.0, 1.0, len(each.steps)) for each in trajectories]
    async with DeviceLane(1) as lane, asyncio.timeout(250):
        ranks = {
            name: ShardedLearner(policy, runtime, lane, settings(ranks=2), member=name)
            for name, policy in shared.items()
        }
        two, one = (
            LearnerTeam(ranks),
            LearnerTeam({name: Learner(each, lane, settings()) for name, each in alone.items()}),
        )
        critics = (
            CriticTeam({name: each.critic(CRITIC, seed=3) for name, each in ranks.items()}),
            CriticTeam({name: Critic(each, lane, CRITIC, seed=3) for name, each in alone.items()}),
        )
        references = (
            ReferenceTeam({name: each.reference() for name, each in ranks.items()}),
            ReferenceTeam({name: Reference(each, lane, 2) for name, each in alone.items()}),
        )
        async with ranks["left"], ranks["right"]:
            for number in range(3):
                value_rows = [await each.values(trajectories) for each in critics]
                for many, single in zip(*value_rows, strict=True):
                    assert many.values == pytest.approx(single.values, rel=1e-5, abs=1e-6)
                for critic, values in zip(critics, value_rows, strict=True):
                    await critic.fit_values(trajectories, values, returns)
                reports = [await each.update(trajectories, list(ADVANTAGES)) for each in (two, one)]
                assert weights(shared).numpy() == pytest.approx(weights(alone).numpy(), abs=1e-5)
                lanes = {"left/rank 0", "right/rank 1", "right/rank 1, collectives"}
                assert lanes <= reports[0].slices.keys()
                assert "left: ranks wait" in reports[0].note
                if number == 0:  # ranks go on from a checkpoint of theirs, as does one process
                    state = TeamState((await two.snapshot()).members, await critics[0].snapshot())
                    await save_checkpoint(tmp_path, state, {})
                    found = (await load_checkpoint(tmp_path / "update-000001")).state
                    for learner, critic in ((two, critics[0]), (one, critics[1])):
                        await learner.restore(found)
                        await critic.restore(found.critic, found.critic_file)
            scores = [await each.log_probs(trajectories) for each in references]
    for many, single in zip(*scores, strict=True):
        for found_row, expected in zip(many, single, strict=True):
            assert found_row == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_rank_that_dies_while_it_saves_costs_no_older_checkpoint_and_all_begin_anew(
    runtime: Runtime,
    tmp_path: Path,
) -> None:
    shared, first = policies(), weights(policies())
    trajectories = episodes(shared)
    async with DeviceLane(1) as lane, asyncio.timeout(250):
        ranks = {
            name: ShardedLearner(policy, runtime, lane, settings(ranks=2), member=name)
            for name, policy in shared.items()
        }
        team = LearnerTeam(ranks)

        async def killed_while_saving() -> None:
            async with ranks["left"], ranks["right"]:
                await team.update(trajectories, list(ADVANTAGES))
                await save_checkpoint(tmp_path, await team.snapshot(), {})
                await team.update(trajectories, list(ADVANTAGES))
                staged = await team.snapshot()
                os.kill(runtime.info(ranks["right"].ranks.ranks[1]).pid, signal.SIGKILL)
                await save_checkpoint(tmp_path, staged, {})

        with pytest.raises(
            RankFailed, match=r"rank 1 of 2 of 'right' \(pid \d+\) is gone: SIGKILL"
        ):
            await killed_while_saving()
    assert newest_name(tmp_path) == str(tmp_path / "update-000001")
    assert (await load_checkpoint(tmp_path / "update-000001")).state.weight_version == 1
    # the ranks of the other policy were well, and a restart without a checkpoint needs both as they
    # were in the beginning
    assert torch.equal(weights(shared), first)


CONFIG = ImitationConfig(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0), micro_batch=2)


def weights_of_policy(policy: Any) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in policy.network.parameters()])


def shown(number: int) -> Demonstration:
    numbers = np.random.default_rng(number).uniform(-1.0, 1.0, (2, 1)).astype(np.float32)
    return Demonstration(observation=state(number, -number), actions=numbers, num_valid=2)


async def test_two_ranks_imitate_as_one_process_and_the_model_follows_when_asked() -> None:
    alone, shared = mlp(), mlp()
    batch, before = [shown(number) for number in range(5)], weights_of_policy(shared)
    async with DeviceLane(1) as lane, asyncio.timeout(200):
        one = Imitator(alone, lane, CONFIG)
        many = msgspec.structs.replace(CONFIG, ranks=2)
        async with opened_imitator(shared, lane, many) as two:
            assert isinstance(two, ShardedImitator)
            for count in (5, 1, 4):  # one row: a rank without any takes part
                reports = [await each.train_step(batch[:count]) for each in (one, two)]
                assert reports[1].metrics == pytest.approx(reports[0].metrics, rel=1e-4)
            assert two.weight_version == 3
            assert torch.equal(weights_of_policy(shared), before)
            await two.fetch_weights()
            assert weights_of_policy(shared).numpy() == pytest.approx(
                weights_of_policy(alone).numpy(), abs=1e-5
            )
            assert await two.evaluate(batch) == pytest.approx(await one.evaluate(batch))
            state = await two.snapshot()
            await two.train_step(batch)
            await one.train_step(batch)
            assert state.weight_version == 3
            await two.fetch_weights()
    assert weights_of_policy(shared).numpy() == pytest.approx(
        weights_of_policy(alone).numpy(), abs=1e-5
    )


@pytest.mark.proof
@pytest.mark.parametrize("shard", ["gradients", "weights"])
async def test_conversations_are_learnt_as_in_one_process(shard: str) -> None:
    alone, shared = (tiny_language(conversations.SHAPE, ["a"], seed=0) for _ in range(2))
    said = ["a b", "c", "a a a a"]
    chats = [
        (Message(role="user", content=each), Message(role="assistant", content=each[::-1]))
        for each in said
    ]
    batch = [chat_demonstration(alone, chat) for chat in chats]
    config = msgspec.structs.replace(CONFIG, ranks=3, shard=shard)
    async with DeviceLane(1) as lane, Runtime() as runtime, asyncio.timeout(250):
        one = Imitator(alone, lane, CONFIG)
        async with ShardedImitator(shared, runtime, lane, config) as three:
            for _ in range(3):
                losses = [
                    (await each.train_step(batch)).metrics["imitation/loss"]
                    for each in (one, three)
                ]
                assert losses[1] == pytest.approx(losses[0], rel=1e-5)
            await three.fetch_weights()
    assert weights_of_policy(shared).numpy() == pytest.approx(
        weights_of_policy(alone).numpy(), abs=1e-5
    )


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


FLOW_ADVANTAGES = [1.0, -1.0, 0.5]

LOSS = PolicyLossConfig(name="nft", kl=KlLossConfig(coef=0.1, estimator="exact"))

SETTINGS = LearnerConfig(
    loss=LOSS,
    optimizer=OptimizerConfig(lr=0.01, warmup_steps=0),
    aggregation="token_mean",
    epochs=3,
    stop_kl=10.0,
)


@pytest.mark.asyncio(loop_scope="session")
async def test_ranks_predict_as_one_process_does(lane: DeviceLane, runtime: Runtime) -> None:
    policy = make_drawing_policy()
    episodes = await run_episodes(policy, lane)
    alone, shared = policy.copy(), policy.copy()
    references = await Reference(policy, lane, micro_batch=8, kl=LOSS.kl).log_probs(episodes)
    await Learner(alone, lane, SETTINGS).update(episodes, FLOW_ADVANTAGES, references)
    learner = ShardedLearner(shared, runtime, lane, msgspec.structs.replace(SETTINGS, ranks=2))
    reference = learner.reference()
    async with learner:
        found = await reference.log_probs(episodes)
        for ours, theirs in zip(found, references, strict=True):
            np.testing.assert_allclose(np.stack(ours), np.stack(theirs), atol=1e-6)
        report = await learner.update(episodes, FLOW_ADVANTAGES, found)
    assert report.metrics["update/steps"] == 3.0
    moved = 0.0
    for one, other, start in zip(
        alone.network.parameters(),
        shared.network.parameters(),
        policy.network.parameters(),
        strict=True,
    ):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=0.0)
        moved += float((one - start).detach().abs().sum())
    assert moved > 0.01


KEEPING = LearnerConfig(
    optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0),
    aggregation="token_mean",
    epochs=3,
    micro_batch=2,
)


@pytest.mark.parametrize(
    ("shard", "has_adapters"), [("gradients", False), ("weights", False), ("replicas", True)]
)
@pytest.mark.asyncio(loop_scope="session")
async def test_ranks_keep_prefixes_and_train_as_one_process_does(
    shard: str, has_adapters: bool, lane: DeviceLane, runtime: Runtime
) -> None:
    policy = tiny_flow_policy()
    choose_trained(policy.network, "expert", None, seed=0, freezes_prefix=True)
    if has_adapters:
        policy = policy.adapted(LoraConfig(rank=2, alpha=4), seed=1)
    episodes = await run_flow_episodes(policy, lane)
    alone, shared = policy.copy(), policy.copy()
    without: Any = msgspec.structs.replace(KEEPING, prefix_cache_gib=0.0)
    await Learner(alone, lane, without).update(episodes, FLOW_ADVANTAGES)
    config: Any = msgspec.structs.replace(KEEPING, ranks=2, shard=shard)
    learner = ShardedLearner(shared, runtime, lane, config)
    critic = learner.critic(CriticConfig(epochs=2), seed=0)
    async with learner:
        estimated = await critic.values(episodes)
        report = await learner.update(episodes, FLOW_ADVANTAGES)
        returns = [each.values + 1.0 for each in estimated]
        await critic.fit_values(episodes, estimated, returns)
    assert report.metrics["update/steps"] == 3.0
    assert report.metrics["update/kept_prefix_gib"] > 0.0
    moved = 0.0
    pairs = zip(
        alone.network.parameters(),
        shared.network.parameters(),
        policy.network.parameters(),
        strict=True,
    )
    for one, other, start in pairs:
        torch.testing.assert_close(other, one, atol=1e-5, rtol=0.0)
        moved += float((one - start).detach().abs().sum())
    assert moved > 0.01
