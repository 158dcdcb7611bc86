"""A head's folder holds the head alone, and is refused over another base."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from steered_bases import BASES, make_steered

from vla_rl.errors import CheckpointError, ConfigError
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
from vla_rl.models.steered.config import BaseSource, SteeringKind
from vla_rl.models.steered.digest import compute_base_digest
from vla_rl.models.steered.folder import load_base, load_steered
from vla_rl.types import Sampling

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
