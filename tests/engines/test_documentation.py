"""docs/policies.md does what it says: its snippets run, and the family it adds acts, learns and is saved."""

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vla_rl.engines import (
    Demonstration,
    DeviceLane,
    EngineConfig,
    ImitationConfig,
    Imitator,
    OptimizerConfig,
    PolicyModel,
    TorchEngine,
    load_checkpoint,
    save_checkpoint,
)
from vla_rl.types import Sampling

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"


@pytest.fixture(scope="module")
def namespace() -> dict[str, Any]:
    """What stands after all snippets ran, top to bottom, as a reader would type them."""
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL), start=1):
            exec(compile(snippet, f"{PAGE.name} snippet {number}", "exec"), names)
    return names


def test_what_the_page_prints_is_true(namespace: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(namespace["main"]())
    assert capsys.readouterr().out == "(8, 7) 0 0\n"


async def test_the_page_judges_an_episode(namespace: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    async with asyncio.timeout(60):
        await namespace["judge"]()
    assert capsys.readouterr().out == "(1,) 0.0 8.0 (56,)\n"


async def test_the_page_saves_and_goes_on(
    namespace: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with asyncio.timeout(60):
        await namespace["save_and_go_on"](tmp_path)
    assert capsys.readouterr().out == "0 {'epoch': 2, 'next': 17}\n"


async def test_the_family_that_the_page_adds_acts_learns_and_is_saved(
    namespace: dict[str, Any], lane: DeviceLane, tmp_path: Path
) -> None:
    policy: PolicyModel[Any] = namespace["MlpPolicy"](seed=0)
    observation = {"state": np.linspace(-1, 1, 8, dtype=np.float32)}
    shown = Demonstration(observation=observation, actions=np.tile(np.array([1, -1], np.float32), (4, 1)), num_valid=4)
    config = ImitationConfig(optimizer=OptimizerConfig(lr=0.01, warmup_steps=0))
    async with asyncio.timeout(60), TorchEngine(policy, lane, EngineConfig()) as engine:
        imitator = Imitator(policy, lane, config, [engine])
        for _ in range(30):
            await imitator.update([shown])
        chunk = await engine.act(observation, Sampling(greedy=True))
        folder = await save_checkpoint(tmp_path, await imitator.snapshot(), {})
        fresh = namespace["MlpPolicy"](seed=1)
        await Imitator(fresh, lane, config).restore((await load_checkpoint(folder)).state)
    assert chunk.weight_version == 30
    assert chunk.actions.tolist() == [[1.0, -1.0]] * 4
    assert torch.equal(fresh.network[0].weight, policy.network[0].weight)
