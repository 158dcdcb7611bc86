"""The README and the pages of docs do what they say: blocks run as they stand, links and options exist."""

import asyncio
import dataclasses
import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rollout_fakes import CountingEngine, LatencyPool

from tests.datasets.support.made_datasets import made_episode
from vla_rl.actors import make_keys
from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.cli.main import recipes
from vla_rl.datasets import LeRobotWriter, read_lerobot
from vla_rl.recipes.recap_flow import RecapFlowConfig
from vla_rl.recipes.sft_flow import SftFlowConfig
from vla_rl.recipes.sft_libero import SftLiberoConfig
from vla_rl.rollout import SchedulerState, embodied_agent
from vla_rl.types import Config, Group
from vla_rl.util.tasks import run_in_simulated_time

DOCS = Path(__file__).parents[1] / "docs"
ENVIRONMENTS = (DOCS / "environments.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", ENVIRONMENTS, re.DOTALL))
"""Blocks of environments.md, by the name of the file in their first lines."""

EXPECTED = {
    "play_here.py": "success: True",
    "play_there.py": "[0. 0. 0. 0. 0. 0. 0. 0.] False {",
    "play_pool.py": "'simulation/leases': 6.0",
    "play_packed.py": "8 episodes in 2 processes",
    "train_elsewhere.py": "(2, 4) [1. 1.]",
    "wrapped.py": "(9.8, 9.8) (4,)",
    "play_mine.py": "True after ",
}


def test_every_block_about_environments_is_known_here() -> None:
    assert ENVIRONMENTS.count("```python") == len(PROGRAMS)
    assert set(PROGRAMS) == {*EXPECTED, "my_envs.py"}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_block_about_environments_prints_what_it_promises(name: str, tmp_path: Path) -> None:
    for file_name, code in PROGRAMS.items():
        (tmp_path / file_name).write_text(code)
    done = subprocess.run(
        [sys.executable, name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert EXPECTED[name] in done.stdout


def test_the_blocks_about_graphs_run_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = DOCS / "graph.md"
    blocks = re.findall(
        r"^```(python|toml)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert [kind for kind, _ in blocks].count("python") == 6
    names: dict[str, object] = {"__name__": "graph_page"}
    for kind, text in blocks:
        if kind == "toml":
            (tmp_path / "pipeline.toml").write_text(text)
        else:
            exec(compile(text, str(page), "exec"), names)
    printed = capsys.readouterr().out
    assert "└── rollout: update -> groups*" in printed
    assert re.search(r"update 2: [\d.]+ (ms|s) = ", printed)
    assert (tmp_path / "live.json").read_text() == (tmp_path / "trace.json").read_text()


def test_the_functions_about_data_sets_look_copy_and_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (DOCS / "data.md").read_text(encoding="utf-8")
    page: dict[str, Any] = {}
    for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL), start=1):
        exec(compile(snippet, f"data.md snippet {number}", "exec"), page)

    LeRobotWriter(tmp_path / "one").add_episode(made_episode("a", 5)).add_episode(
        made_episode("b", 2)
    )
    page["look_at"](tmp_path / "one")
    assert (
        "a push the plate 5 True\nb push the plate 2 True\n(12, 12, 3) [" in capsys.readouterr().out
    )
    page["with_images"](tmp_path / "one", tmp_path / "two")
    assert [episode.name for episode in read_lerobot(tmp_path / "two")] == ["a", "b"]
    assert callable(page["recording"](tmp_path / "new", embodied_agent))


def test_every_option_of_the_page_about_data_sets_exists() -> None:
    text = (DOCS / "data.md").read_text(encoding="utf-8")
    others, flow = text.split("## Fine-tune a flow policy")
    flow, rest = flow.split("\n## ", 1)
    recap, rest = rest.split("\n## ", 1)
    for section, recipe in (
        (others + rest, SftLiberoConfig),
        (flow, SftFlowConfig),
        (recap, RecapFlowConfig),
    ):
        named = set(re.findall(r"`--([a-z-]+)", section)) - {"from", "record-to", "run", "data"}
        assert {name.replace("-", "_") for name in named} - {"policy"} <= set(
            recipe.__struct_fields__
        )


README = Path(__file__).parent.parent / "README.md"


def test_your_own_environment_agent_reward_and_node_train_as_the_readme_shows(
    import_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", README.read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["my_task.py", "train_mine.py"]
    for name, text in blocks:
        (import_folder / name).write_text(text)
    monkeypatch.chdir(import_folder)
    runpy.run_path("train_mine.py", run_name="__main__")
    assert "everything in runs/mine-" in capsys.readouterr().out
    metrics = next((import_folder / "runs").glob("mine-*/metrics.jsonl")).read_text()
    assert metrics.count("mine/best_reward") == 2


def test_every_page_the_readme_names_is_there() -> None:
    for page in re.findall(r"\]\(([\w/.]+)\)", README.read_text()):
        assert (README.parent / page).is_file(), page


def anchors_of(page: Path) -> set[str]:
    """The anchors that a page's headings get: lower case, dashes for spaces, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings
    }


def test_every_link_between_pages_leads_to_a_heading_that_is_there() -> None:
    root = README.parent
    for page in [*root.glob("*.md"), *(root / "docs").rglob("*.md")]:
        for target, anchor in re.findall(r"\]\(([\w/.-]*)#([\w-]+)\)", page.read_text()):
            linked = page.parent / target if target else page
            assert anchor in anchors_of(linked), f"{page.name} links to {target}#{anchor}"


def test_the_commands_the_readme_names_exist() -> None:
    makefile = (README.parent / "Makefile").read_text()
    for target in set(re.findall(r"make (\w+)", README.read_text())):
        assert f"\n{target}:" in makefile, target
    recipes = README.parent / "vla_rl" / "recipes"
    for module in set(re.findall(r"-m vla_rl\.recipes\.(\w+)", README.read_text())):
        assert (recipes / f"{module}.py").is_file() or (
            recipes / module / "__main__.py"
        ).is_file(), module


def test_the_readme_names_every_recipe() -> None:
    text = README.read_text().replace("python -m vla_rl.recipes.", "")
    assert [name for name in recipes() if f"`{name}`" not in text] == []


COMING_FROM = (Path(__file__).parent.parent / "docs" / "coming_from.md").read_text()
SECTIONS = dict(
    re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", COMING_FROM, re.DOTALL | re.MULTILINE)
)


def config_of(recipe: str) -> type[Config]:
    """The configuration that a recipe's module defines for its command line."""
    module = import_module(f"vla_rl.recipes.{recipe}")
    wanted = f"{recipe.replace('_', '')}config"
    (found,) = [value for name, value in vars(module).items() if name.lower() == wanted]
    config: type[Config] = found
    return config


def is_option(config: Config, option: str) -> bool:
    """Whether `--learner.loss.clip-low` and the like is a field of the configuration, or of what
    starts a run.
    """
    path = option.removeprefix("--").replace("-", "_").split(".")
    if path[0] in {field.name for field in dataclasses.fields(TrainingLaunch)}:
        return len(path) == 1
    value: Any = config
    for name in path:
        if name not in getattr(value, "__struct_fields__", ()):
            return False
        value = getattr(value, name)
    return True


def test_the_page_compares_with_four_projects_in_thirty_rows_or_more() -> None:
    assert list(SECTIONS) == ["RLinf", "SimpleVLA-RL", "verl", "siiRL"]
    for name, body in SECTIONS.items():
        assert len(re.findall(r"^\| `", body, re.MULTILINE)) >= 7, name
    assert len(re.findall(r"^\| `", COMING_FROM, re.MULTILINE)) >= 30


@pytest.mark.parametrize("project", SECTIONS)
def test_every_option_of_a_table_is_one_of_the_recipe_it_is_named_for(project: str) -> None:
    (recipe,) = re.findall(r"Recipe: `(\w+)`", SECTIONS[project])
    config = config_of(recipe)()
    options = set(re.findall(r"--[a-z][\w.-]*", SECTIONS[project]))
    assert len(options) > 10
    assert not [option for option in sorted(options) if not is_option(config, option)]


def test_the_options_named_above_the_tables_are_ones_of_the_libero_recipes() -> None:
    above = COMING_FROM.partition("\n## ")[0]
    config = config_of("grpo_libero")()
    options = set(re.findall(r"--[a-z][\w.-]*", above))
    assert options
    assert not [option for option in sorted(options) if not is_option(config, option)]


@pytest.mark.parametrize("project", SECTIONS)
def test_the_command_of_each_section_parses_into_a_valid_configuration(project: str) -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", SECTIONS[project], re.DOTALL)
    python, dash_m, module, *arguments = shlex.split(block.replace("\\\n", " "))
    (recipe,) = re.findall(r"Recipe: `(\w+)`", SECTIONS[project])
    assert (python, dash_m, module) == ("python", "-m", f"vla_rl.recipes.{recipe}")
    command = parse_command(TrainingLaunch, config_of(recipe), "", arguments)
    assert command.config.scheduler.max_staleness == 0
    assert command.config.group_size == 8


def test_an_option_that_does_not_exist_is_found() -> None:
    config = config_of("grpo_libero")()
    assert is_option(config, "--learner.loss.clip-low")
    assert is_option(config, "--resume")
    assert not is_option(config, "--learner.loss.clip-lo")
    assert not is_option(config, "--resume.path")
    assert not is_option(config, "--prompts")


ROLLOUT_PAGE = Path(__file__).parents[1] / "docs" / "rollout.md"


def test_the_agent_and_the_training_loop_of_the_page_run_as_shown() -> None:
    shown: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", ROLLOUT_PAGE.read_text(), flags=re.DOTALL):
        exec(compile(block, str(ROLLOUT_PAGE), "exec"), shown)

    async def main() -> tuple[SchedulerState, list[Group]]:
        engine, trained = CountingEngine(), list[Group]()

        async def learn(groups: list[Group]) -> None:
            trained.extend(groups)
            engine.weight_version += 1

        async with asyncio.timeout(3600), engine.batcher:
            return await shown["train"](LatencyPool(8), engine, learn, 3), trained

    state, trained = run_in_simulated_time(main())
    assert state.version == 3
    assert state.ledger.trained == 3 * 4 * 8
    assert {group.task for group in trained} == {"libero_goal/3"}
    assert all(0.0 < group.success_rate < 1.0 for group in trained)


ACTORS_PAGE = Path(__file__).parents[1] / "docs" / "actors.md"
ACTORS_SNIPPETS = re.findall(r"```python\n(.*?)```", ACTORS_PAGE.read_text(), flags=re.DOTALL)


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
    "number", [number for number, text in enumerate(ACTORS_SNIPPETS) if "async def main" in text]
)
async def test_a_snippet_of_the_page_runs(number: int, folder: Path) -> None:
    module = load(folder, f"snippet_{number}", ACTORS_SNIPPETS[number])
    async with asyncio.timeout(60):
        await module.main()


def test_the_placement_of_the_page_reads_the_keys_that_are_made(folder: Path) -> None:
    (source,) = [text for text in ACTORS_SNIPPETS if "def placement" in text]
    module = load(folder, "snippet_placement", source)
    make_keys(folder / "keys")
    placement = module.placement(folder / "keys", "tcp://10.0.0.2:7070")
    assert placement.client_keys.public == (folder / "keys" / "client.pub").read_text().strip()


def test_the_contracts_of_the_page_about_testing_pass_in_a_plain_pytest(tmp_path: Path) -> None:
    pages = (DOCS / name for name in ("testing.md", "environments.md", "add_a_policy_family.md"))
    for page in pages:
        named = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page.read_text(), re.DOTALL)
        for name, code in named:
            (tmp_path / name).write_text(code)
    (tmp_path / "camera.py").write_text(ACTORS_SNIPPETS[0])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    for kind in ("env", "policy", "engine", "actor"):
        assert f"test_my_{kind}.py ." in done.stdout


def test_every_snippet_of_the_page_is_run() -> None:
    assert len(ACTORS_SNIPPETS) == 8


POLICIES_PAGE = Path(__file__).parents[1] / "docs" / "policies.md"


@pytest.fixture(scope="module")
def namespace() -> dict[str, Any]:
    """What stands after all snippets ran, top to bottom, as a reader would type them."""
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        for number, snippet in enumerate(
            re.findall(r"```python\n(.*?)```", POLICIES_PAGE.read_text(), re.DOTALL), start=1
        ):
            exec(compile(snippet, f"{POLICIES_PAGE.name} snippet {number}", "exec"), names)
    return names


def test_what_the_page_prints_is_true(
    namespace: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(namespace["main"]())
    assert capsys.readouterr().out == "(8, 7) 0 0\n"


async def test_the_page_evaluates_an_episode(
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
