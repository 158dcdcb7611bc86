"""Meta-World's tasks by suite and name; what the pages say of them."""

import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import vla_rl.envs
from vla_rl.cli.main import recipes
from vla_rl.envs.metaworld import SUITES, MetaWorldEnv, find_task, list_tasks
from vla_rl.envs.metaworld.scene import VERSION, load_metaworld
from vla_rl.errors import EnvError, PackageError
from vla_rl.util.installing import REQUIREMENTS, pins


def test_the_suites_are_the_packages_own_in_its_order() -> None:
    from metaworld import env_dict

    own = {"metaworld_mt10": env_dict.MT10_V3, "metaworld_mt50": env_dict.MT50_V3}
    assert {suite: [f"{name}-v3" for name in names] for suite, names in SUITES.items()} == {
        suite: list(envs) for suite, envs in own.items()
    }
    assert set(own["metaworld_mt50"]) == set(load_metaworld().experts)
    assert tuple(SUITES) == vla_rl.envs.METAWORLD_SUITES


def test_a_task_is_found_by_number_and_by_name() -> None:
    assert find_task("metaworld_mt10", 4) == find_task("metaworld_mt10", "drawer-open-v3")
    assert find_task("metaworld_mt10", "drawer-open").key == "metaworld_mt10/4"
    assert all(task.instruction for task in list_tasks("metaworld_mt50"))


@pytest.mark.parametrize(
    ("suite", "task_id", "words"),
    [
        ("metaworld_mt99", 0, "suite is 'metaworld_mt99', expected one of metaworld_mt10"),
        ("metaworld_mt10", 10, "task_id is 10, expected 0 to 9"),
        ("metaworld_mt10", True, "task_id is True, expected 0 to 9"),
        ("metaworld_mt50", "drawer-opn", "did you mean 'drawer-open'"),
        ("metaworld_mt10", "hammer", "task_id is 'hammer'.*expected one of metaworld_mt10's tasks"),
    ],
)
def test_a_task_that_does_not_exist_is_refused(suite: str, task_id: int | str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gymnasium.make("vla_rl/metaworld-v0", suite=suite, task_id=task_id)


def test_a_start_beyond_the_list_is_refused(drawer_env: MetaWorldEnv) -> None:
    with pytest.raises(ValueError, match=r"init_state_id is 2147483648, expected 0 to 49, or up"):
        drawer_env.reset(options={"init_state_id": 1 << 31})


def test_a_state_of_another_task_or_quality_is_refused(drawer_env: MetaWorldEnv) -> None:
    drawer_env.reset(seed=0)
    state = drawer_env.get_state()
    with pytest.raises(ValueError, match="the state is one of metaworld_mt10/5"):
        drawer_env.set_state({**state, "task": "metaworld_mt10/5"})
    with pytest.raises(ValueError, match="quality='exact'"):
        drawer_env.set_state({**state, "quality": "exact"})


def test_a_bad_action_is_refused(drawer_env: MetaWorldEnv) -> None:
    drawer_env.reset(seed=0)
    with pytest.raises(ValueError, match=r"shape \(7,\), expected \(4,\)"):
        drawer_env.step(np.zeros(7, np.float32))


@pytest.fixture
def nothing_loaded() -> Iterator[None]:
    load_metaworld.cache_clear()
    yield
    load_metaworld.cache_clear()


def test_another_version_is_refused_with_the_command_that_helps(
    nothing_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "3.1.1")
    with pytest.raises(EnvError, match=r"metaworld is 3.1.1, expected 3.0.0.*metaworld==3.0.0"):
        load_metaworld()


def test_a_missing_package_is_reported_with_the_command_that_installs_it(
    nothing_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    # an EnvError too, which recipes print in one line
    with pytest.raises(PackageError, match="Meta-World is not installed; run `pip install"):
        load_metaworld()


def test_the_pin_is_the_version_that_is_accepted() -> None:
    assert pins(REQUIREMENTS / "metaworld.txt") == [f"metaworld=={VERSION}"]


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
