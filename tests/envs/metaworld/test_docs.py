"""docs/metaworld.md and docs/add_a_simulator.md: what they show runs, and what they name exists."""

import re
from pathlib import Path

import pytest

from vla_rl.cli.main import recipes
from vla_rl.envs.metaworld.tasks import SUITES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "metaworld.md").read_text()
GUIDE = (ROOT / "docs" / "add_a_simulator.md").read_text()


def test_the_block_of_the_page_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(block, names)
    assert names["info"]["task"] == "metaworld_mt50/19"  # type: ignore[index]
    names["env"].close()  # type: ignore[attr-defined]


def test_the_table_of_experts_has_every_task_once() -> None:
    rows = re.findall(r"(\d+) \| ([a-z-]+) \| (\d+)/50 \| \d+", PAGE)
    assert [name for _, name, _ in sorted(rows, key=lambda row: int(row[0]))] == list(
        SUITES["metaworld_mt50"]
    )
    assert f"{sum(int(solved) for *_, solved in rows)} of 2500" in PAGE


@pytest.mark.parametrize("page", [PAGE, GUIDE], ids=["metaworld", "add_a_simulator"])
def test_files_links_and_recipes_that_a_page_names_exist(page: str) -> None:
    paths = set(re.findall(r"`((?:vla_rl|tests|docs|scripts|envs)/[\w/.]*)`", page))
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([\w/.#-]+)\)", page)}
    assert not [link for link in sorted(links) if link and not (ROOT / "docs" / link).exists()]
    named = set(re.findall(r"vla-rl (\w+)", page)) - {"install"}
    assert named <= set(recipes())
