"""docs/add_a_policy_family.md does what it says: its family is trained, judged, taught and loaded
as the page shows.
"""

import asyncio
import importlib
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vla_rl.datasets import LeRobotWriter, RecordedEpisode
from vla_rl.engines import DeviceLane, EngineConfig, PolicyModel, TorchActionEngine
from vla_rl.errors import ConfigError, PolicyError
from vla_rl.learner import Demonstration, ImitationConfig, Imitator
from vla_rl.team.members import Member
from vla_rl.types import Sampling

PAGE = Path(__file__).parents[2] / "docs" / "add_a_policy_family.md"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The page's two files, as a reader would save and import them."""
    family, *rest = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    files = {"my_family": family, "train_mine": "\n".join(rest)}
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}
    for module, text in files.items():
        assert text.startswith(f"# {module}.py")
        (tmp_path / f"{module}.py").write_text(text)
        monkeypatch.delitem(sys.modules, module, raising=False)
        names |= vars(importlib.import_module(module))
    return names


@pytest.fixture
def policy(page: dict[str, Any]) -> PolicyModel[Any]:
    with torch.random.fork_rng():
        made: PolicyModel[Any] = page["CnnPolicy"](seed=0)
    return made


@pytest.fixture
async def lane() -> AsyncIterator[DeviceLane]:
    async with DeviceLane(num_threads=1) as lane:
        yield lane


async def test_the_family_is_trained_judged_and_loaded(
    page: dict[str, Any], policy: PolicyModel[Any], tmp_path: Path
) -> None:
    before = policy.network["head"].weight.detach().clone()  # type: ignore[index]
    async with asyncio.timeout(200):
        outcome = await page["train_mine"](policy, tmp_path)
        share = await page["judge"](policy)
    assert outcome.progress.num_episodes >= 4 * 16
    assert 0.0 <= share <= 1.0
    assert not torch.equal(policy.network["head"].weight, before)  # type: ignore[index]
    loaded = page["load_mine"](outcome.run.path).checkpoint_tensors()
    assert all(
        torch.equal(tensor, loaded[name]) for name, tensor in policy.checkpoint_tensors().items()
    )


async def test_the_family_is_taught_by_demonstrations(
    page: dict[str, Any], policy: PolicyModel[Any], tmp_path: Path
) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    episode = RecordedEpisode(
        name="a",
        instruction="reach the red square",
        actions=np.tile(np.array([1.0, -1.0], np.float32), (6, 1)),
        vectors={"state": np.zeros((6, 2), np.float32)},
        frames={"image": frames.__getitem__},
    )
    LeRobotWriter(tmp_path / "demos").add(episode)
    async with asyncio.timeout(60):
        first = await page["teach"](policy, tmp_path / "demos", 1)
        last = await page["teach"](policy, tmp_path / "demos", 30)
    assert last < 0.5 * first


def test_a_class_in_place_of_an_instance_is_named(page: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match="the policy is the class CnnPolicy, expected an instance of it"
    ):
        Member(page["CnnPolicy"])


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Dropout(0.1), "Dropout 'eyes.7' in training mode"),
        (nn.BatchNorm1d(64), "BatchNorm1d 'eyes.7' in training mode"),
    ],
)
def test_layers_by_which_acting_and_learning_disagree_are_named(
    layer: nn.Module, message: str, policy: PolicyModel[Any]
) -> None:
    policy.network["eyes"].append(layer)  # type: ignore[index]
    with pytest.raises(ConfigError, match=message):
        Member(policy)
    policy.network.eval()
    Member(policy)


def test_a_checkpoint_that_would_not_bring_the_policy_back_is_named(
    policy: PolicyModel[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "checkpoint_tensors", lambda: {"w": torch.zeros(1)}, raising=True)
    with pytest.raises(
        ConfigError, match=r"CnnPolicy has \d+ parameters, of which checkpoint_tensors gives 1"
    ):
        Member(policy)


async def test_actions_of_another_shape_are_named(
    policy: PolicyModel[Any], lane: DeviceLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "decode", lambda tokens: np.zeros((len(tokens) * 4, 2), np.float32))
    seen = {"image": np.zeros((32, 32, 3), np.uint8)}
    async with asyncio.timeout(30):
        with pytest.raises(
            PolicyError,
            match=r"CnnPolicy\.decode gave \[4, 2\] for 1 decisions, expected \[1, H, D\]",
        ):
            async with TorchActionEngine(policy, lane, EngineConfig()) as engine:
                await engine.act(seen, Sampling())


async def test_chunks_of_another_length_teach_nothing(
    policy: PolicyModel[Any], lane: DeviceLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "encode", lambda actions: np.zeros((len(actions), 8), np.int64))
    seen = {"image": np.zeros((32, 32, 3), np.uint8)}
    whole, short = (
        Demonstration(observation=seen, actions=np.zeros((n, 2), np.float32), num_valid=n)
        for n in (4, 3)
    )
    async with asyncio.timeout(30):
        for shown in ([short], [whole, short]):
            with pytest.raises(ValueError, match=r"is a chunk \[3, 2\], expected \[4, 2\]"):
                await Imitator(policy, lane, ImitationConfig()).update(shown)
