"""docs/policies.md does what it says, and configurations import in an instant."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"


@pytest.fixture(scope="module")
def namespace() -> dict[str, Any]:
    """What stands after all snippets ran, top to bottom, as a reader would type them."""
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        for number, snippet in enumerate(
            re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL), start=1
        ):
            exec(compile(snippet, f"{PAGE.name} snippet {number}", "exec"), names)
    return names


def test_what_the_page_prints_is_true(
    namespace: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(namespace["main"]())
    assert capsys.readouterr().out == "(8, 7) 0 0\n"


async def test_the_page_judges_an_episode(
    namespace: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    async with asyncio.timeout(60):
        await namespace["evaluate"]()
    assert capsys.readouterr().out == "(1,) 0.0 8.0 (56,)\n"


async def test_the_page_saves_and_goes_on(
    namespace: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with asyncio.timeout(60):
        await namespace["save_and_go_on"](tmp_path)
    assert capsys.readouterr().out == "0 {'epoch': 2, 'next': 17}\n"


@pytest.mark.parametrize(
    "statement",
    [
        "from vla_rl.engines import EngineConfig; from vla_rl.learner import LearnerConfig",
        "from vla_rl.models.openvla_oft import OpenVlaOftConfig, tiny; tiny()",
    ],
)
def test_configs_bring_no_torch(statement: str) -> None:
    code = (
        f"import sys; {statement}; print([name for name in ('torch', 'timm', 'transformers') if "
        "name in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert output.stdout.strip() == "[]"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    import vla_rl.engines
    import vla_rl.models.openvla_oft

    for module in (vla_rl.engines, vla_rl.models.openvla_oft):
        with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
            _ = module.Nothing


def test_everything_in_the_shop_window_is_there() -> None:
    import vla_rl.engines
    import vla_rl.models.openvla_oft

    for module in (vla_rl.engines, vla_rl.models.openvla_oft):
        assert all(getattr(module, name) is not None for name in module.__all__)
