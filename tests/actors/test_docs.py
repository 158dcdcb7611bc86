"""Does exactly what docs/actors.md shows."""

import asyncio
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vla_rl.actors import make_keys

PAGE = Path(__file__).parents[2] / "docs" / "actors.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sys.path.insert(0, str(tmp_path))
    return tmp_path


def load(folder: Path, name: str, source: str) -> ModuleType:
    """Import a snippet as the file that a reader would make of it."""
    file = folder / f"{name}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "number", [number for number, text in enumerate(SNIPPETS) if "async def main" in text]
)
async def test_a_snippet_of_the_page_runs(number: int, folder: Path) -> None:
    module = load(folder, f"snippet_{number}", SNIPPETS[number])
    async with asyncio.timeout(60):
        await module.main()


def test_the_placement_of_the_page_reads_the_keys_that_are_made(folder: Path) -> None:
    (source,) = [text for text in SNIPPETS if "def placement" in text]
    module = load(folder, "snippet_placement", source)
    make_keys(folder / "keys")
    placement = module.placement(folder / "keys", "tcp://10.0.0.2:7070")
    assert placement.client_keys.public == (folder / "keys" / "client.pub").read_text().strip()


def test_every_snippet_of_the_page_is_run() -> None:
    assert len(SNIPPETS) == 7
