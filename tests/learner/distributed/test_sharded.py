"""A learner over several ranks computes what one process computes, and ends as one."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch
import transformers
from engine_fixtures import run_policy as run_policy_fixture
from small_episodes import mlp, walk
from tiny_vision import FAMILIES, shown_episodes, tiny_vision
from torch import Tensor

from benchmarks import conversations
from benchmarks.shared_updates import gradients, relative_difference, saved, settings
from vla_rl.actors import Runtime
from vla_rl.algorithms import PolicyLossConfig
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.learner import (
    Critic,
    CriticConfig,
    Learner,
    LearnerConfig,
    OptimizerConfig,
    PolicyLearner,
    Reference,
    TeamState,
    load_checkpoint,
    save_checkpoint,
)
from vla_rl.learner.decisions import flatten_trajectories
from vla_rl.learner.distributed import RankFailed, ShardedLearner
from vla_rl.learner.distributed.weights import write_staged
from vla_rl.learner.estimates.rank_memory import PolicySize, rank_memory, require_gpus
from vla_rl.models.language import VisionLanguageModel, tiny as tiny_language
from vla_rl.models.mlp import MlpPolicy
from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft import OpenVlaOft, tiny
from vla_rl.models.prismatic.config import LoraConfig, OpenVlaConfig
from vla_rl.types import SOLE_MEMBER, Trajectory

pytestmark = pytest.mark.asyncio(loop_scope="session")
run_policy = run_policy_fixture._get_wrapped_function()()
ADVANTAGES = (1.0, -0.5, 0.25)


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def lane() -> AsyncIterator[DeviceLane]:
    async with DeviceLane(num_threads=1) as lane:
        yield lane


def oft() -> OpenVlaOft:
    shape = tiny(image_size=28, cameras=("image",), proprio=None, chunk_size=2, action_dim=2)
    return OpenVlaOft.create(msgspec.structs.replace(shape, num_bins=16), seed=0)


def openvla() -> OpenVla:
    shape = tiny(image_size=28, cameras=("image",), proprio=None, chunk_size=2, action_dim=2)
    names = set(OpenVlaConfig.__struct_fields__)
    fields = {name: getattr(shape, name) for name in shape.__struct_fields__ if name in names}
    return OpenVla.create(OpenVlaConfig(**{**fields, "num_bins": 16}), seed=0)


def language() -> Any:
    return tiny_language(conversations.SHAPE, ["a"], seed=0)


def qwen3_moe() -> Any:
    """A tiny mixture of experts of Qwen3's architecture: two of four experts for each token."""
    shape = transformers.Qwen3MoeConfig(
        **conversations.QWEN3,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    return conversations.with_random_weights(transformers.Qwen3MoeForCausalLM, shape)


def episodes(policy: Any) -> list[Trajectory]:
    """Three episodes of unequal lengths that the policy itself ran."""
    if isinstance(policy, MlpPolicy):
        return [walk(policy, seed, steps) for seed, steps in ((1, 1), (2, 5), (3, 2))]
    if isinstance(policy, OpenVlaOft):
        return [run_policy(policy, seed, steps) for seed, steps in ((1, 1), (2, 4), (3, 2))]
    if isinstance(policy, VisionLanguageModel):
        return shown_episodes(policy)
    if isinstance(policy, OpenVla):
        return [one_action(policy, seed, steps) for seed, steps in ((1, 1), (2, 4), (3, 2))]
    return [
        conversations.chat(policy, 0),
        conversations.broken(policy, 1),
        conversations.episode(2, conversations.turn(policy, [9, 9], [25])),
    ]


def one_action(policy: OpenVla, seed: int, num_steps: int) -> Trajectory:
    trajectory: Trajectory = run_policy(policy, seed, num_steps)
    steps = tuple(
        msgspec.structs.replace(step, rewards=step.rewards[:1]) for step in trajectory.steps
    )
    return msgspec.structs.replace(trajectory, steps=steps)


def weights(policy: Any) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in policy.network.named_parameters()}


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The norm of the differences of all weights over the norm of the weights.

    Not element by element: Adam moves a weight whose gradient is rounding noise by up to the
    learning rate.
    """
    pairs = [torch.cat([each[name].flatten() for name in expected]) for each in (found, expected)]
    return float((pairs[0] - pairs[1]).norm() / pairs[1].norm())


def sharded(
    policy: Any, runtime: Runtime, lane: DeviceLane, num_ranks: int = 2, **changes: Any
) -> ShardedLearner:
    return ShardedLearner(policy, runtime, lane, settings(ranks=num_ranks, **changes))


async def difference(
    make: Callable[[], Any],
    runtime: Runtime,
    lane: DeviceLane,
    folder: Path,
    num_ranks: int,
    **changes: Any,
) -> float:
    """How far the first gradient of several ranks is from that of one process."""
    alone, shared = make(), make()
    trajectories = episodes(alone)
    expected = await gradients(
        Learner(alone, lane, settings()), trajectories, ADVANTAGES, folder / "alone"
    )
    async with sharded(shared, runtime, lane, num_ranks, **changes) as learner:
        found = await gradients(learner, trajectories, ADVANTAGES, folder / "shared")
    return relative_difference(found, expected)


# In the suite, ranks of an MLP: those of the others import transformers for 3 s of CPU time each.
@pytest.mark.parametrize("make", [mlp, pytest.param(oft, marks=pytest.mark.proof)])
async def test_two_ranks_learn_what_one_process_learns_and_either_continues_the_other(
    make: Callable[[], Any], runtime: Runtime, lane: DeviceLane, tmp_path: Path
) -> None:
    alone, shared = make(), make()
    trajectories = episodes(alone)
    one, changed = Learner(alone, lane, settings()), weights(shared)
    engine = TorchActionEngine(shared, lane, EngineConfig())
    async with ShardedLearner(shared, runtime, lane, settings(ranks=2), [engine]) as two:
        expected = await gradients(one, trajectories, ADVANTAGES, tmp_path / "one")
        found = await gradients(two, trajectories, ADVANTAGES, tmp_path / "two")
        assert relative_difference(found, expected) <= 3e-6
        for _ in range(2):
            reports = [await each.update(trajectories, list(ADVANTAGES)) for each in (one, two)]
            timed = ("update/seconds", "rank/", "ranks/")
            compared = [
                {name: value for name, value in each.metrics.items() if not name.startswith(timed)}
                for each in reports
            ]
            assert compared[1] == pytest.approx(compared[0], rel=1e-4, abs=1e-5)
        assert (two.weight_version, engine.weight_version) == (3, 3)
        assert apart(weights(shared), weights(alone)) <= 1e-5
        assert any(not torch.equal(each, changed[name]) for name, each in weights(shared).items())
        state = await saved(two, tmp_path / "later")
        assert sorted(file.name for file in (tmp_path / "later/update-000003").rglob("*.st*")) == []
        assert type(shared).load(tmp_path / "later" / "update-000003" / "policy").config.chunk_size
        continued = make()
        resumed = Learner(continued, lane, settings())
        await resumed.restore(state)
        await two.restore(await saved(one, tmp_path / "other"))
        for learner in (two, resumed):
            await learner.update(trajectories, list(ADVANTAGES))
        assert apart(weights(continued), weights(shared)) <= 1e-5


async def critic_gap(
    make: Callable[[], Any],
    runtime: Runtime,
    lane: DeviceLane,
    trunk: str,
    num_ranks: int = 2,
    **changes: Any,
) -> float:
    """How far a critic and a reference on ranks are from those of one process, after updates.

    The policy learns too, and the critic's state goes through both kinds of learner.
    """
    alone, shared = make(), make()
    trajectories, returns = episodes(alone), []
    for number, trajectory in enumerate(trajectories):
        returns.append(np.linspace(-1.0, 0.5 * number, len(trajectory.steps)))
    optimizer = OptimizerConfig(lr=3e-3, warmup_steps=0)
    critic = CriticConfig(optimizer=optimizer, trunk=trunk, micro_batch=2, epochs=2)  # type: ignore[arg-type]
    one = Learner(alone, lane, settings())
    reference, first = Reference(alone, lane, 2), Critic(alone, lane, critic, seed=3)
    two = ShardedLearner(shared, runtime, lane, settings(ranks=num_ranks, **changes))
    frozen, second = two.reference(), two.critic(critic, seed=3)
    gaps = []
    async with two:
        for round_number in range(2):
            value_rows = [await each.values(trajectories) for each in (first, second)]
            fitted = [
                await each.fit_values(trajectories, values, returns)
                for each, values in zip((first, second), value_rows, strict=True)
            ]
            assert fitted[1] == pytest.approx(fitted[0], rel=1e-4, abs=1e-6)
            for learner in (one, two):
                await learner.update(trajectories, list(ADVANTAGES))
            if round_number == 0:  # one goes on from the other's file
                state = TeamState({SOLE_MEMBER: await two.snapshot()}, await second.snapshot())
                folder = two.ranks.group.folder / "checkpoint"
                await save_checkpoint(folder, state, {})
                found = (await load_checkpoint(folder / "update-000001")).state
                await first.restore(found.critic)
                await second.restore(found.critic, found.critic_file)
        for before, after in zip(value_rows[0], value_rows[1], strict=True):
            gaps.append(np.abs(before.values - after.values).max() / np.abs(before.values).max())
        scores = [await each.log_probs(trajectories) for each in (reference, frozen)]
    for expected, found_scores in zip(*scores, strict=True):
        pairs = zip(expected, found_scores, strict=True)
        gaps += [np.abs(a - b).max() / np.abs(a).max() for a, b in pairs]
    with pytest.raises(RuntimeError, match="run already; ask for a reference before"):
        two.reference()
    return float(max(gaps))


async def test_a_critic_and_a_reference_on_ranks_are_those_of_one_process(
    runtime: Runtime, lane: DeviceLane
) -> None:
    assert await critic_gap(mlp, runtime, lane, "own") <= 1e-5


@pytest.mark.parametrize("make", [mlp, pytest.param(conversations.qwen3, marks=pytest.mark.proof)])
async def test_offloaded_masters_have_the_gradients_of_one_process(
    make: Callable[[], Any], runtime: Runtime, lane: DeviceLane, tmp_path: Path
) -> None:
    assert await difference(make, runtime, lane, tmp_path, 2, offload=True) <= 3e-6


@pytest.mark.parametrize("make", [mlp, pytest.param(qwen3_moe, marks=pytest.mark.proof)])
async def test_shared_weights_also_of_a_mixture_of_experts_have_the_gradients_of_one_process(
    make: Callable[[], Any], runtime: Runtime, lane: DeviceLane, tmp_path: Path
) -> None:
    assert await difference(make, runtime, lane, tmp_path, 2, shard="weights") <= 3e-6


def frozen_vision() -> Any:
    policy = tiny_vision()
    policy.freeze_vision()
    return policy


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_policy_of_images_has_the_gradients_of_one_process_also_if_a_rank_sees_none(
    family: str, runtime: Runtime, lane: DeviceLane, tmp_path: Path
) -> None:
    policy = tiny_vision(family=family)
    shown, text, other = (flatten_trajectories([each], [1.0]) for each in episodes(policy))
    assert int(text.num_input_tokens) > int(shown.num_input_tokens) + int(
        other.num_input_tokens
    )  # a rank of its own
    assert await difference(policy.copy, runtime, lane, tmp_path, 2) <= 3e-6


@pytest.mark.proof
@pytest.mark.parametrize("make", [tiny_vision, frozen_vision])
@pytest.mark.parametrize("shard", ["gradients", "weights", "replicas"])
async def test_towers_that_are_trained_or_frozen_have_the_gradients_of_one_process(
    shard: str, make: Callable[[], Any], runtime: Runtime, lane: DeviceLane, tmp_path: Path
) -> None:
    assert await difference(make, runtime, lane, tmp_path, 3, shard=shard) <= 3e-6


@pytest.mark.parametrize("make", [mlp, pytest.param(language, marks=pytest.mark.proof)])
async def test_metrics_of_two_ranks_are_those_of_one_process_and_none_counts_twice(
    make: Callable[[], Any], runtime: Runtime, lane: DeviceLane
) -> None:
    changes: Any = {
        "epochs": 2,
        "minibatch_trajectories": 2,
        "loss": PolicyLossConfig(name="gspo"),
        "entropy_coef": 0.01,
    }
    alone, shared = make(), make()
    trajectories = episodes(alone)
    one = Learner(alone, lane, settings(**changes))
    async with sharded(shared, runtime, lane, 2, **changes) as two:
        for _ in range(2):
            reports = [await each.update(trajectories, list(ADVANTAGES)) for each in (one, two)]
            expected, found = (
                {name: value for name, value in each.metrics.items() if name != "update/seconds"}
                for each in reports
            )
            ranks = {name for name in found if name.startswith(("rank/", "ranks/"))}
            assert {name.split("/")[1] for name in ranks if name.startswith("rank/")} == {"0", "1"}
            assert found.keys() - ranks == expected.keys()
            for name, value in expected.items():
                assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
            for name in ("tokens", "rows", "decisions", "steps"):
                assert found[f"update/{name}"] == expected[f"update/{name}"]


@pytest.mark.proof
@pytest.mark.parametrize("shard", ["gradients", "weights", "replicas"])
async def test_offloaded_updates_of_policy_and_critic_are_those_of_one_process(
    shard: str, runtime: Runtime, lane: DeviceLane
) -> None:
    assert await critic_gap(oft, runtime, lane, "own", shard=shard, offload=True) <= 1e-5


@pytest.mark.proof
async def test_a_critic_and_a_reference_of_a_policy_that_sees_are_those_of_one_process(
    runtime: Runtime, lane: DeviceLane
) -> None:
    assert await critic_gap(oft, runtime, lane, "own") <= 1e-5


@pytest.mark.proof
@pytest.mark.parametrize("shard", ["gradients", "weights"])
@pytest.mark.parametrize("trunk", ["own", "shared"])
@pytest.mark.parametrize("make", [oft, language])
async def test_critics_of_each_family_and_trunk_are_those_of_one_process(
    make: Callable[[], Any], trunk: str, shard: str, runtime: Runtime, lane: DeviceLane
) -> None:
    assert await critic_gap(make, runtime, lane, trunk, 3, shard=shard) <= 1e-5


def adapted() -> OpenVlaOft:
    return oft().adapted(LoraConfig(rank=2, alpha=4), seed=1)


def half_frozen() -> MlpPolicy:
    policy = mlp()
    policy.network.head.requires_grad_(False)
    return policy


@pytest.mark.parametrize("make", [half_frozen, pytest.param(adapted, marks=pytest.mark.proof)])
async def test_every_adapter_has_a_gradient_and_frozen_weights_stay(
    make: Callable[[], Any], runtime: Runtime, lane: DeviceLane
) -> None:
    policy = make()
    trajectories, before = episodes(policy), weights(policy)
    trained = {name for name, each in policy.network.named_parameters() if each.requires_grad}
    async with sharded(policy, runtime, lane, shard="replicas") as learner:
        for _ in range(2):  # the first step moves the halves that begin at 0, which move the others
            await learner.update(trajectories, list(ADVANTAGES))
    alone = make()
    one = Learner(alone, lane, settings())
    for _ in range(2):
        await one.update(trajectories, list(ADVANTAGES))
    expected = weights(alone)
    moved = {name for name, each in weights(policy).items() if not torch.equal(each, before[name])}
    assert moved == {name for name, each in expected.items() if not torch.equal(each, before[name])}
    assert moved
    assert moved <= trained < before.keys()
    if make is adapted:
        assert all("lora_" in name for name in trained)
        # the towers' last blocks and their pooling never run; all other adapters have a gradient
        *towers, _ = policy.network.block_stacks()
        unused = {id(each) for tower in towers for each in tower[-1].parameters()}
        idle = {name for name, each in policy.network.named_parameters() if id(each) in unused}
        idle |= {name for name in trained if ".attn_pool." in name}
        assert trained - moved <= idle
    assert apart(weights(policy), expected) <= 1e-5


async def test_a_gradient_with_nan_on_one_rank_is_skipped_on_all(
    runtime: Runtime, lane: DeviceLane
) -> None:
    policy = mlp()
    loss = PolicyLossConfig(name="own_parts:nan_of_large_advantages")
    trajectories, before = episodes(policy), weights(policy)
    learner = sharded(policy, runtime, lane, 3, loss=loss)
    learner.count_flops(1e9)
    async with learner:
        report = await learner.update(trajectories, [1.0, -0.5, 11.0])
        assert {"rank 0", "rank 2", "rank 2, collectives"} <= report.slices.keys()
        assert all(report.metrics[f"rank/{rank}/mfu"] > 0.0 for rank in range(3))
        assert 0.0 < report.metrics["ranks/communication_share"] < 1.0
        assert "mostly for rank" in report.note
        assert report.metrics["update/skipped_steps"] == 1.0
        assert all(torch.equal(each, before[name]) for name, each in weights(policy).items())
        report = await learner.update(trajectories[:1], [1.0])  # one row, three ranks
        assert report.metrics["update/skipped_steps"] == 0.0
        assert (report.weight_version, report.metrics["update/rows"]) == (2, 1.0)
        assert not torch.equal(weights(policy)["head.weight"], before["head.weight"])


async def test_a_full_disk_ends_no_rank_and_a_killed_rank_is_named_and_all_end(
    runtime: Runtime, lane: DeviceLane, tmp_path: Path
) -> None:
    policy = mlp()
    trajectories = episodes(policy)
    async with sharded(policy, runtime, lane) as learner:
        await learner.snapshot()
        with pytest.raises(CheckpointError, match="missing could not be written"):
            await write_staged(learner.ranks.group, 1, "policy", tmp_path / "missing", {})
        report = await learner.update(trajectories, [0.0, 0.0, 0.0])
        assert (report.weight_version, report.metrics["update/trained"]) == (1, 0.0)
        await learner.update(trajectories, list(ADVANTAGES))
        pids = [runtime.info(rank).pid for rank in learner.ranks.ranks]
        killed = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankFailed, match=r"rank 1 of 2 .* is gone: SIGKILL.*all ranks"):
            await learner.update(trajectories, list(ADVANTAGES))
        assert time.monotonic() - killed < 10.0
        assert {runtime.info(rank).pid for rank in learner.ranks.ranks}.isdisjoint(pids)
        with pytest.raises(RankFailed, match="rank 1 of 2"):
            await learner.snapshot()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)  # noqa: ASYNC240


async def test_an_observation_that_a_rank_refuses_ends_with_its_own_error(
    runtime: Runtime, lane: DeviceLane
) -> None:
    policy = mlp()
    bad = walk(policy, 4, 2)
    steps = (msgspec.structs.replace(bad.steps[0], observation={"state": "no"}), bad.steps[1])
    trajectories = [*episodes(policy), msgspec.structs.replace(bad, steps=steps)]
    async with sharded(policy, runtime, lane) as learner, asyncio.timeout(60):
        with pytest.raises(Exception, match="state") as raised:
            await learner.update(trajectories, [1.0, -0.5, 0.25, 1.0])
        assert not isinstance(raised.value, RankFailed)


class NotSaved(MlpPolicy):
    """A policy that ranks cannot get."""

    save = None  # type: ignore[assignment]


async def test_policies_that_ranks_cannot_share_are_refused(
    runtime: Runtime, lane: DeviceLane
) -> None:
    mixed = mlp()
    mixed.network.head.to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"types .*bfloat16.*float32.*, expected one"):
        sharded(mixed, runtime, lane)


async def test_more_ranks_than_gpus_and_too_little_memory_are_refused() -> None:
    size = PolicySize(num_trained=7_541_237_184, num_frozen=0, bytes_each=2)
    gib = 1 << 30
    with pytest.raises(ConfigError, match="ranks is 3, but there are 2 GPUs"):
        require_gpus(LearnerConfig(ranks=3), [80 * gib] * 2, size)
    with pytest.raises(ConfigError, match=r"GPU 0 has 40.0 GiB, expected at least 52.7 .*\+ 14.0"):
        require_gpus(LearnerConfig(ranks=8), [40 * gib] * 8, size)
    require_gpus(LearnerConfig(ranks=8), [80 * gib] * 8, size)
    require_gpus(LearnerConfig(ranks=8, shard="weights"), [40 * gib] * 8, size)


async def test_memory_by_rank_is_that_of_the_arithmetic() -> None:
    size = PolicySize(num_trained=1000, num_frozen=100, bytes_each=2)
    parts = rank_memory(size, LearnerConfig(ranks=4))
    assert (parts.weights, parts.gradients, parts.masters, parts.moments) == (
        2200,
        4000,
        1000,
        2000,
    )
    parts = rank_memory(size, LearnerConfig(ranks=4, shard="weights"))
    assert (parts.weights, parts.gradients, parts.masters, parts.moments) == (200, 1000, 1000, 2000)
    parts = rank_memory(size, LearnerConfig(ranks=4, shard="replicas"))
    assert (parts.weights, parts.gradients, parts.masters, parts.moments) == (
        2200,
        4000,
        4000,
        8000,
    )


async def test_memory_by_rank_has_a_reference_a_critic_and_what_is_offloaded() -> None:
    size = PolicySize(num_trained=1000, num_frozen=100, bytes_each=2)
    own, shared = CriticConfig(), CriticConfig(trunk="shared")
    ranks = LearnerConfig(ranks=4)
    both = rank_memory(size, ranks, has_reference=True, critic=own)
    assert (both.reference, both.critic, both.total) == (2200, 9200, 2 * 9200 + 2200)
    assert rank_memory(size, ranks, critic=shared).total == 9200
    shards = LearnerConfig(ranks=4, shard="weights", offload=True)
    parts = rank_memory(size, shards, has_reference=True, critic=own)
    assert (parts.weights, parts.gradients, parts.masters, parts.moments) == (200, 0, 0, 0)
    assert (parts.reference, parts.critic) == (550, 200)
    assert parts.offloaded == 2 * 16 * 250
    kept = rank_memory(size, LearnerConfig(ranks=4, offload=True))
    assert (kept.total, kept.offloaded) == (2200 + 4000, 16 * 250)
    with pytest.raises(ConfigError, match="offload is True, expected False with one rank"):
        LearnerConfig(offload=True)


async def test_a_checkpoint_of_another_policy_is_refused(
    runtime: Runtime, lane: DeviceLane, tmp_path: Path
) -> None:
    other = MlpPolicy.create(msgspec.structs.replace(mlp().config, hidden=(24,)), seed=0)
    state = await saved(Learner(other, lane, settings()), tmp_path)
    async with sharded(mlp(), runtime, lane) as learner:
        with pytest.raises(CheckpointError, match="of another policy"):
            await learner.restore(state)


@pytest.mark.proof
@pytest.mark.parametrize("shard", ["gradients", "weights", "replicas"])
@pytest.mark.parametrize("make", [oft, openvla, language])
async def test_gradients_of_each_family_are_those_of_one_process(
    make: Callable[[], Any], shard: str, runtime: Runtime, lane: DeviceLane, tmp_path: Path
) -> None:
    assert await difference(make, runtime, lane, tmp_path, 2, shard=shard) <= 3e-6


@pytest.mark.proof
@pytest.mark.parametrize("make", [oft, openvla, language])
async def test_gradients_of_four_ranks_are_those_of_one_process(
    make: Callable[[], Any], runtime: Runtime, lane: DeviceLane, tmp_path: Path
) -> None:
    assert await difference(make, runtime, lane, tmp_path, 4) <= 3e-5


def recomputing() -> OpenVlaOft:
    policy = oft()
    policy.recompute_activations()
    return policy


@pytest.mark.proof
async def test_recomputed_activations_have_the_same_gradients(
    runtime: Runtime, lane: DeviceLane, tmp_path: Path
) -> None:
    assert await difference(recomputing, runtime, lane, tmp_path, 2) <= 3e-6


@pytest.mark.proof
@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (oft, {"shard": "weights"}),
        (openvla, {"shard": "gradients"}),
        (recomputing, {"offload": True}),
        (adapted, {"shard": "replicas"}),
    ],
)
async def test_four_ranks_that_share_layers_in_pairs_have_the_gradients_of_one_process(
    make: Callable[[], Any],
    changes: dict[str, Any],
    runtime: Runtime,
    lane: DeviceLane,
    tmp_path: Path,
) -> None:
    gap = await difference(make, runtime, lane, tmp_path, 4, tensor_parallel=2, **changes)
    assert gap <= 3e-5


@pytest.mark.proof
@pytest.mark.parametrize(("trunk", "shard"), [("own", "gradients"), ("shared", "weights")])
async def test_critics_and_references_of_ranks_that_share_layers_are_those_of_one_process(
    trunk: str, shard: str, runtime: Runtime, lane: DeviceLane
) -> None:
    assert await critic_gap(oft, runtime, lane, trunk, 2, shard=shard, tensor_parallel=2) <= 1e-5


@pytest.mark.proof
@pytest.mark.parametrize("tensor_parallel", [1, 2])
async def test_bfloat16_has_the_norm_and_direction_of_one_process(
    tensor_parallel: int, runtime: Runtime, lane: DeviceLane, tmp_path: Path
) -> None:
    def half() -> OpenVlaOft:
        policy = oft()
        policy.network.to(torch.bfloat16)
        return policy

    alone, shared = half(), half()
    trajectories, loose = episodes(alone), {"max_mismatch": 1.0}
    one = Learner(alone, lane, settings(**loose))
    expected = await gradients(one, trajectories, ADVANTAGES, tmp_path / "one")
    ranks = {**loose, "tensor_parallel": tensor_parallel}
    async with sharded(shared, runtime, lane, **ranks) as learner:
        found = await gradients(learner, trajectories, ADVANTAGES, tmp_path / "two")
        state = await saved(learner, tmp_path / "again")
        continued = half()
        await Learner(continued, lane, settings()).restore(state)
    flat = [torch.cat([each[name].flatten() for name in expected]) for each in (found, expected)]
    assert float(flat[0].norm() / flat[1].norm()) == pytest.approx(1.0, abs=0.01)
    assert float(torch.cosine_similarity(flat[0], flat[1], dim=0)) > 0.99
    assert {each.dtype for each in weights(shared).values()} == {torch.bfloat16}
    assert all(torch.equal(each, weights(shared)[n]) for n, each in weights(continued).items())


@pytest.mark.proof
@pytest.mark.parametrize(
    ("loss", "shard"),
    [("gspo", "gradients"), ("clip_cov", "weights"), ("decoupled_ppo", "weights")],
)
async def test_losses_with_a_global_part_are_those_of_one_process(
    loss: str, shard: str, runtime: Runtime, lane: DeviceLane
) -> None:
    alone, shared = language(), language()
    trajectories = episodes(alone)
    changes: dict[str, Any] = {
        "loss": PolicyLossConfig(name=loss),
        "minibatch_trajectories": 2,
        "epochs": 2,
    }
    one = Learner(alone, lane, settings(**changes))
    async with sharded(shared, runtime, lane, shard=shard, **changes) as two:
        for _ in range(3):
            for learner in (one, two):
                await learner.update(trajectories, list(ADVANTAGES))
    assert apart(weights(shared), weights(alone)) <= 1e-5


@pytest.mark.proof
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
async def test_saved_on_two_ranks_it_continues_on_any_number(
    num_ranks: int, runtime: Runtime, lane: DeviceLane, tmp_path: Path
) -> None:
    first, later = oft(), oft()
    trajectories = episodes(first)

    async def update(learner: PolicyLearner, times: int) -> None:
        for _ in range(times):
            await learner.update(trajectories, list(ADVANTAGES))

    async with sharded(first, runtime, lane) as two:
        await update(two, 2)
        state = await saved(two, tmp_path)
        await update(two, 2)
    if num_ranks == 1:
        one = Learner(later, lane, settings())
        await one.restore(state)
        await update(one, 2)
    else:
        async with sharded(later, runtime, lane, num_ranks) as many:
            await many.restore(state)
            await update(many, 2)
    assert apart(weights(later), weights(first)) <= 1e-5


@pytest.mark.proof
async def test_a_stopped_rank_is_named(runtime: Runtime, lane: DeviceLane) -> None:
    policy = mlp()
    trajectories = episodes(policy)
    async with sharded(policy, runtime, lane) as learner, asyncio.timeout(30):
        await learner.update(trajectories, list(ADVANTAGES))
        os.kill(runtime.info(learner.ranks.ranks[0]).pid, signal.SIGSTOP)
        with pytest.raises(RankFailed, match=r"rank 0 of 2 .*stopped by a signal"):
            await learner.update(trajectories, list(ADVANTAGES))
