"""A head is trained, published, saved alone; its folder is refused over another base."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from steered_bases import BASES, make_steered

from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import Kind
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.learner import Critic, CriticConfig, Learner, LearnerConfig, OptimizerConfig
from vla_rl.models.example_inputs import example_row
from vla_rl.models.loading import (
    CheckpointConfig,
    compute_digest,
    count_weight_bytes,
    load_policy,
)
from vla_rl.models.prismatic.conventions import AS_STORED
from vla_rl.models.shipped import (
    BASE_POLICY,
    FLOW_BASE_POLICY,
    PLACEHOLDER_BASE_POLICY,
    SHIPPED,
    SHIPPED_FLOW,
)
from vla_rl.models.steered import SteeredPolicy, SteeringConfig
from vla_rl.models.steered.bases import compute_base_digest
from vla_rl.models.steered.config import BaseSource, SteeringKind
from vla_rl.models.steered.folder import load_base, load_steered
from vla_rl.types import (
    ActionChunk,
    EnvSpec,
    EpisodeSpec,
    Sampling,
    Step,
    StopReason,
    Trajectory,
)

CPU = torch.device("cpu")


def save_over(folder: Path, family: str, seed: int = 0, kind: str = "residual") -> SteeredPolicy:
    """Save a base and a head over it below `folder`."""
    BASES[family].make(seed).save(folder / "base")
    base = load_base(str(folder / "base"), AS_STORED, CPU)
    config = SteeringConfig(kind=kind, hidden=(16,), proprio_size=2)  # type: ignore[arg-type]
    policy = SteeredPolicy.create(base, config, seed=3)
    with torch.no_grad():
        policy.network.mean.weight.add_(0.1)
    policy.save(folder / "head")
    return policy


def act(policy: SteeredPolicy, family: str) -> np.ndarray:
    """Return the actions of two seeded decisions."""
    with torch.inference_mode():
        batch = policy.prepare([BASES[family].observe(seed) for seed in (0, 1)])
        sampled = policy.sample(batch, [Sampling(seed=4), Sampling(seed=5)])
    chunk = sampled.tokens if sampled.chunk is None else sampled.chunk
    return policy.decode(chunk.numpy())


@pytest.mark.parametrize("family", list(BASES))
def test_a_saved_head_loads_as_any_policy_and_acts_as_before(family: str, tmp_path: Path) -> None:
    policy = save_over(tmp_path, family)
    loaded = load_policy(str(tmp_path / "head"), CheckpointConfig(), "cpu")
    assert isinstance(loaded, SteeredPolicy)
    assert loaded.layout == policy.layout
    np.testing.assert_array_equal(act(loaded, family), act(policy, family))
    again = SteeredPolicy.load(tmp_path / "head")
    np.testing.assert_array_equal(act(again, family), act(policy, family))
    assert loaded.describe() == policy.describe()


def test_the_folder_holds_the_head_alone(tmp_path: Path) -> None:
    policy = save_over(tmp_path, "oft_tokens")
    with safe_open(tmp_path / "head" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert names == set(policy.checkpoint_tensors())
    assert all(name.startswith("steering_head.") for name in names)
    assert (tmp_path / "head" / "model.safetensors").stat().st_size < 100_000


def test_a_head_is_refused_over_another_base(tmp_path: Path) -> None:
    save_over(tmp_path, "mlp")
    BASES["mlp"].make(1).save(tmp_path / "other")
    config = CheckpointConfig(base_policy=str(tmp_path / "other"))
    with pytest.raises(CheckpointError, match=r"is a head over the base .* but .*other is"):
        load_policy(str(tmp_path / "head"), config, "cpu")
    with pytest.raises(CheckpointError, match="but the given base is"):
        load_steered(tmp_path / "head", BASES["mlp"].make(1))
    assert load_steered(tmp_path / "head", BASES["mlp"].make(0)).is_steering


def test_a_base_that_was_trained_on_is_another_base(tmp_path: Path) -> None:
    save_over(tmp_path, "mlp")
    with torch.no_grad():
        trained = BASES["mlp"].make(0)
        trained.network.head.bias[0] += 1e-6
    with pytest.raises(CheckpointError, match="weights, statistics or settings are others"):
        load_steered(tmp_path / "head", trained)


def test_a_base_that_moved_is_found_by_the_option(tmp_path: Path) -> None:
    policy = save_over(tmp_path, "mlp")
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"cannot be loaded from .*base: .*--base-policy"):
        load_policy(str(tmp_path / "head"), CheckpointConfig(), "cpu")
    config = CheckpointConfig(base_policy=str(tmp_path / "moved"))
    loaded = load_policy(str(tmp_path / "head"), config, "cpu")
    assert isinstance(loaded, SteeredPolicy)
    np.testing.assert_array_equal(act(loaded, "mlp"), act(policy, "mlp"))
    loaded.save(tmp_path / "again")  # names the folder where its base is now
    assert load_steered(tmp_path / "again").layout == policy.layout


@pytest.mark.parametrize(
    ("shipped", "kind", "name"),
    [
        (BASE_POLICY, "residual", SHIPPED),
        (PLACEHOLDER_BASE_POLICY, "residual", SHIPPED),
        (FLOW_BASE_POLICY, "noise", SHIPPED_FLOW),
    ],
)
def test_a_shipped_base_is_given_by_its_name(
    shipped: Path, kind: SteeringKind, name: str, tmp_path: Path
) -> None:
    config = SteeringConfig(kind=kind, hidden=(16,))
    base = load_base(str(shipped), AS_STORED, CPU)
    base.source = BaseSource(path=f"/elsewhere/{shipped.name}")  # as on another machine
    policy = SteeredPolicy.create(base, config, seed=3)
    policy.save(tmp_path / "head")
    with pytest.raises(CheckpointError, match="cannot be loaded from /elsewhere"):
        load_policy(str(tmp_path / "head"), CheckpointConfig(), "cpu")
    format = CheckpointConfig(base_policy=name)
    loaded = load_policy(str(tmp_path / "head"), format, "cpu")
    assert isinstance(loaded, SteeredPolicy)
    assert loaded.base.digest == policy.base.digest
    assert shipped / "config.json" in format.list_files(str(tmp_path / "head"))
    other = CheckpointConfig(base_policy=SHIPPED if name == SHIPPED_FLOW else SHIPPED_FLOW)
    with pytest.raises(
        CheckpointError, match=f"is a head over the base .* but {other.base_policy} is"
    ):
        load_policy(str(tmp_path / "head"), other, "cpu")


def test_a_base_without_a_folder_has_to_be_given(tmp_path: Path) -> None:
    make_steered("mlp").save(tmp_path / "head")
    with pytest.raises(CheckpointError, match="does not say where its base is"):
        load_policy(str(tmp_path / "head"), CheckpointConfig(), "cpu")


def test_a_head_cannot_be_the_base_of_another(tmp_path: Path) -> None:
    save_over(tmp_path, "mlp")
    config = CheckpointConfig(base_policy=str(tmp_path / "head"))
    with pytest.raises(CheckpointError, match="holds a head over a frozen base"):
        load_policy(str(tmp_path / "head"), config, "cpu")


def test_other_families_refuse_the_option_of_a_base(tmp_path: Path) -> None:
    save_over(tmp_path, "mlp")
    config = CheckpointConfig(base_policy=str(tmp_path / "base"))
    with pytest.raises(ConfigError, match=r"base_policy is .* which does not read it"):
        load_policy(str(tmp_path / "base"), config, "cpu")


def test_a_head_with_a_changed_configuration_is_refused(tmp_path: Path) -> None:
    save_over(tmp_path, "mlp")
    path = tmp_path / "head" / "config.json"
    (tmp_path / "head" / "manifest.json").unlink(missing_ok=True)
    path.write_text(path.read_text().replace('"proprio": 2', '"proprio": 1'))
    with pytest.raises(CheckpointError, match="head"):
        load_steered(tmp_path / "head")
    path.write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_steered(tmp_path / "head")


@pytest.mark.parametrize("family", list(BASES))
def test_a_digest_survives_saving_and_changes_with_any_weight(family: str, tmp_path: Path) -> None:
    policy = BASES[family].make(0)
    policy.save(tmp_path / "base")
    digest = compute_base_digest(policy)
    assert len(digest) == 64
    assert load_base(str(tmp_path / "base"), AS_STORED, CPU).digest == digest
    with torch.no_grad():
        next(iter(policy.network.parameters())).view(-1)[0] += 1.0
    assert compute_base_digest(policy) != digest


def test_the_files_of_a_head_are_its_own_and_its_bases(tmp_path: Path) -> None:
    save_over(tmp_path, "mlp")
    format = CheckpointConfig()
    files = format.list_files(str(tmp_path / "head"))
    assert {each.parent.name for each in files} == {"head", "base"}
    weights = (tmp_path / "head" / "model.safetensors", tmp_path / "base" / "model.safetensors")
    assert count_weight_bytes(files) == sum(each.stat().st_size for each in weights)
    before = compute_digest(files)
    (tmp_path / "base" / "notes.txt").write_text("another base")
    assert compute_digest(format.list_files(str(tmp_path / "head"))) != before


EPISODE = EpisodeSpec(
    episode_id=0, group_id=0, member=0, env=EnvSpec(id="none"), task="none", seed=0, policy_seed=0
)


async def run_policy(engine: Any, family: str, number: int) -> Trajectory:
    """Run three decisions of the policy's own."""
    steps = []
    for decision in range(3):
        seen = BASES[family].observe(10 * number + decision)
        chunk = await engine.act(seen, Sampling(seed=10 * number + decision))
        rewards = np.ones(len(chunk.actions), np.float32)
        steps.append(Step(observation=seen, chunk=chunk, rewards=rewards))
    return Trajectory(
        episode=msgspec.structs.replace(EPISODE, episode_id=number, member=number),
        steps=tuple(steps),
        final_observation=BASES[family].observe(99),
        stop_reason=StopReason.TERMINATED,
    )


@pytest.mark.parametrize(
    ("family", "kind"),
    [("oft_tokens", "residual"), ("flow", "residual"), ("flow", "noise"), ("mlp", "tokens")],
)
async def test_an_update_moves_the_head_alone_and_publishes_it(
    family: str, kind: str, lane: DeviceLane
) -> None:
    policy = make_steered(family, kind)
    base = {name: each.clone() for name, each in policy.base.policy.checkpoint_tensors().items()}
    config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0), max_mismatch=1.0)
    async with (
        asyncio.timeout(100),
        TorchActionEngine(policy.copy(), lane, EngineConfig()) as engine,
    ):
        learner = Learner(policy, lane, config, publish_to=[engine])
        before = (await learner.snapshot()).policy
        trajectories = [await run_policy(engine, family, number) for number in range(2)]
        report = await learner.update(trajectories, [1.0, -1.0])
        after = await learner.snapshot()
        assert report.metrics["update/skipped_steps"] == 0.0
        moved = {name for name in before if not torch.equal(before[name], after.policy[name])}
        assert "steering_head.mean.weight" in moved
        assert "steering_head.is_on" not in moved
        acted = dict(engine.network.named_parameters())
        assert torch.equal(acted["mean.weight"], policy.network.mean.weight)
        # another update, of decisions that the first one's weights made
        await learner.update([await run_policy(engine, family, 3)], [1.0])
        policy.load_checkpoint_tensors(after.policy)
        assert torch.equal(policy.network.mean.weight, after.policy["steering_head.mean.weight"])
    for name, tensor in policy.base.policy.checkpoint_tensors().items():
        assert torch.equal(tensor, base[name])


async def test_a_critic_learns_on_the_heads_features(lane: DeviceLane) -> None:
    policy = make_steered("oft_l1")
    config = CriticConfig(trunk="own", optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0), epochs=4)
    async with (
        asyncio.timeout(100),
        TorchActionEngine(policy, lane, EngineConfig()) as engine,
    ):
        trajectory = await run_policy(engine, "oft_l1", 0)
        critic = Critic(policy, lane, config, seed=0)
        (before,) = await critic.values([trajectory])
        await critic.fit_values([trajectory], [before], [np.ones(3, np.float32)])
        (after,) = await critic.values([trajectory])
    assert after.values.min() > before.values.max()


async def test_a_decision_crosses_the_wire_with_all_that_it_has_drawn(lane: DeviceLane) -> None:
    policy = make_steered("mlp")  # it reads no state of its own: an array of no numbers
    async with TorchActionEngine(policy, lane, EngineConfig()) as engine:
        chunk = await engine.act(BASES["mlp"].observe(0), Sampling(seed=1))
    codec = Codec()
    frames = codec.encode(Kind.CALL, 0, 0, 0, chunk, "a decision")
    received = codec.decode(codec.get_decoder(ActionChunk), frames)
    assert received.drawn is not None
    assert chunk.drawn is not None
    assert received.drawn["proprio"].shape == (0,)
    for name, values in chunk.drawn.items():
        np.testing.assert_array_equal(received.drawn[name], values)
    policy.check_drawn(received.drawn)


@pytest.mark.parametrize(("family", "kind"), [("flow", "noise"), ("oft_l1", "residual")])
def test_an_estimate_of_memory_gets_a_row_that_is_scored(family: str, kind: str) -> None:
    policy = make_steered(family, kind)
    row = example_row(policy)
    assert row is not None
    log_prob, _ = policy.log_probs(row.batch, row.tokens, torch.ones(1))
    assert log_prob.isfinite().all()
    acting = {key: value for key, value in policy.example_observation(0).items() if key != "drawn"}
    with torch.inference_mode():
        policy.sample(policy.prepare([acting]), [Sampling()])
