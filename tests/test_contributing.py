"""CONTRIBUTING.md names what exists, and its steps lead to what they promise.

A family for one's own run (`docs/add_a_policy_family.md`) has its own test, as has a loss.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PAGE = (ROOT / "CONTRIBUTING.md").read_text()

ANSWERS = re.findall(r"^\| ([^|]+\?) \| `([\w/]+\.py):([\w.]+)`", PAGE, re.MULTILINE)

RECIPES = dict(re.findall(r"^## (Add [^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def test_every_file_that_the_page_names_is_there() -> None:
    paths = set(re.findall(r"`((?:vla_rl|tests|docs|scripts)/[\w/.]*)`", PAGE)) | set(
        re.findall(r"\]\(([\w/.]+)", PAGE)
    )
    assert len(paths) > 20
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]


def test_every_target_that_the_page_names_is_one_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make ([\w-]+)", PAGE)):
        assert f"\n{target}:" in makefile, target


def test_every_target_of_the_makefile_is_in_the_table_of_commands() -> None:
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    explained = set(re.findall(r"^\| `make ([\w-]+)` \|", PAGE, re.MULTILINE))
    assert explained == set(targets.split()) - {"demo", "install", "clean"}  # README has these


def test_the_readme_leads_to_the_table_of_questions() -> None:
    assert "(CONTRIBUTING.md)" in (ROOT / "README.md").read_text()
    assert len(ANSWERS) >= 30


@pytest.mark.parametrize(("question", "path", "name"), ANSWERS)
def test_each_question_is_answered_by_a_name_that_is_there(
    question: str, path: str, name: str
) -> None:
    body: list[ast.stmt] = ast.parse((ROOT / "vla_rl" / path).read_text()).body
    for part in name.split("."):
        (found,) = [node for node in body if getattr(node, "name", None) == part]
        body = getattr(found, "body", [])


def test_the_files_beside_an_answer_are_there() -> None:
    table = PAGE.partition("## Where things are")[2].partition("\n## ")[0]
    table = table.replace("`vla_rl/`", "")
    paths = set(re.findall(r"`([\w/]+/[\w.]*)", table))
    assert not [path for path in sorted(paths) if not (ROOT / "vla_rl" / path).exists()]


@pytest.mark.parametrize(
    ("recipe", "path", "names"),
    [
        (
            "Add a loss",
            "vla_rl/algorithms/losses/declaration.py",
            ["declare_loss", "LossResult", "DeclaredLoss", "has_trust_region"],
        ),
        (
            "Add a loss",
            "tests/algorithms/losses/test_loss_gradients.py",
            ["WITH_STOPPED_GRADIENTS"],
        ),
        ("Add an environment", "vla_rl/envs/__init__.py", ["_register("]),
        (
            "Add an environment",
            "tests/contracts/test_env_contract.py",
            ["EmbodiedEnvContract", "spec"],
        ),
        (
            "Add a policy family",
            "vla_rl/models/loading.py",
            ["Family", "CheckpointFormat", "policy_family", "load_openvla"],
        ),
        (
            "Add a policy family",
            "vla_rl/models/families.py",
            ["FAMILIES", "RobotPolicy"],
        ),
        ("Add a pipeline", "vla_rl/pipelines/registry.py", ["PIPELINES", "SETTINGS"]),
        ("Add a pipeline", "tests/pipelines/test_pipelines.py", ["NEEDS_IMAGES"]),
    ],
)
def test_a_recipe_names_what_stands_in_its_files(recipe: str, path: str, names: list[str]) -> None:
    assert path.rpartition("/")[2] in RECIPES[recipe]
    text = (ROOT / path).read_text()
    for name in names:
        assert name in RECIPES[recipe], name
        assert name in text, name


WATCHED = '''"""GRPO that logs the size of each update."""

from typing import Any, Final

from vla_rl.graph import NodeOutput, Pipeline
from vla_rl.pipelines.grpo import grpo
from vla_rl.pipelines.parts import Parts

READS: Final = ("reward",)
SETTINGS: Final[dict[str, Any]] = {"advantage": {"name": "dr_grpo"}}


def watched(parts: Parts) -> Pipeline:
    """Build the pipeline of one update."""
    return grpo(parts, "watched", "GRPO with a log").add_node("sizes", log_sizes, reads="groups")


async def log_sizes(groups: Any) -> NodeOutput:
    """Log the number of groups."""
    return NodeOutput(values={}, metrics={"mine/groups": float(len(groups))})
'''

DRAWN_AND_SHOWN = """
import sys
from vla_rl.recipes.train_toy import cli
command = ["train_toy", "--pipeline", "watched"]
shown = sys.argv[1]
sys.argv = [*command, "--draw", shown]
assert cli() == 0
sys.argv = [*command, "--help-all"]
try:
    cli()
except SystemExit as ended:
    assert ended.code == 0
print("drawn and shown", flush=True)
"""

SAVED_AND_LOADED = """
from vla_rl.models.cousin import OpenVla, OpenVlaConfig
from vla_rl.models.loading import CheckpointFormat, read_family, load_policy
from vla_rl.models.openvla_oft import tiny


shape = tiny(image_size=28)
fields = set(OpenVlaConfig.__struct_fields__) & set(shape.__struct_fields__) - {"cameras"}
config = OpenVlaConfig(**{name: getattr(shape, name) for name in fields})
OpenVla.create(config, seed=0).save("saved")
assert read_family("saved") == "cousin"
for format in (CheckpointFormat(), CheckpointFormat(policy_family="cousin")):
    assert isinstance(load_policy("saved", format, "cpu"), OpenVla)
print("saved and loaded")
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package `vla_rl` whose rooms are links to ours; `own_room` copies one to change it."""
    copy = tmp_path_factory.mktemp("steps") / "vla_rl"
    copy.mkdir()
    for entry in (ROOT / "vla_rl").iterdir():
        if entry.name != "__pycache__":
            (copy / entry.name).symlink_to(entry)
    return copy


def own_room(package: Path, room: str) -> Path:
    source = (package / room).resolve()
    (package / room).unlink()
    shutil.copytree(source, package / room, ignore=shutil.ignore_patterns("__pycache__"))
    return package / room


def change(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


def run(package: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *command],
        cwd=package.parent,
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        timeout=280,  # a busy machine
    )


def run_tests(package: Path, tests: Path, wanted: str) -> str:
    options = ("-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"))
    done = run(package, "-m", "pytest", str(tests), *options, "-k", wanted)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
    assert "failed" not in done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def watched(package: Path) -> Path:
    """The package with one more pipeline."""
    room = own_room(package, "pipelines")
    (room / "watched.py").write_text(WATCHED)
    change(room / "registry.py", '"grpo",\n', '"grpo",\n            "watched",\n')
    return package


def test_an_environment_that_is_added_as_the_steps_say_keeps_the_contract(package: Path) -> None:
    room = own_room(package, "envs")
    smallest = (room / "toy.py").read_text()
    (room / "slider.py").write_text(smallest.replace("ToyReachEnv", "SliderEnv"))
    change(
        room / "__init__.py",
        '_register("vla_rl/control',
        '_register("vla_rl/slider-v0", "vla_rl.envs.slider:SliderEnv")\n_register("vla_rl/control',
    )
    contracts = package.parent / "contracts"
    shutil.copytree(
        ROOT / "tests" / "contracts", contracts, ignore=shutil.ignore_patterns("conftest.py")
    )
    test = contracts / "test_env_contract.py"
    slider = (
        'class TestSlider(EmbodiedEnvContract):\n    spec = EnvSpec(id="vla_rl/slider-v0")\n\n\n'
    )
    change(test, "class TestToy(", f"{slider}class TestToy(")
    change(test, "        TOY.id,\n", '        TOY.id,\n        "vla_rl/slider-v0",\n')
    run_tests(package, test, "(Slider and not process) or held_to_the_contract")


@pytest.fixture(scope="module")
def cousin(package: Path) -> Path:
    """The package with one more family of policies."""
    room = own_room(package, "models")
    family = room / "cousin.py"
    shutil.copy(room / "openvla.py", family)
    change(family, 'family="openvla"', 'family="cousin"')
    change(family, 'extension, "openvla")', 'extension, "cousin")')
    declared = room / "prismatic" / "conventions.py"
    change(declared, 'Literal["openvla", ', 'Literal["cousin", "openvla", ')
    change(declared, 'Literal["auto", "openvla", ', 'Literal["auto", "cousin", "openvla", ')
    loading = room / "loading.py"
    change(
        loading,
        '    if folder.extension.family == "openvla":\n',
        '    if folder.extension.family == "cousin":\n        return "cousin"\n'
        '    if folder.extension.family == "openvla":\n',
    )
    change(
        loading,
        '    if family == "openvla":\n',
        '    if family == "cousin":\n'
        "        from vla_rl.models import cousin\n\n"
        "        return cousin.OpenVla.load(checkpoint, config, device=chosen)\n"
        '    if family == "openvla":\n',
    )
    return package


@pytest.fixture(scope="module")
def ended(watched: Path, cousin: Path) -> "subprocess.CompletedProcess[str]":
    """What a pipeline and a family are for, in one process: each would import torch."""
    drawn = str(watched.parent / "graph.svg")
    return run(cousin, "-c", DRAWN_AND_SHOWN + SAVED_AND_LOADED, drawn)


def test_a_pipeline_that_is_added_as_the_steps_say_is_drawn_with_its_settings(
    package: Path, ended: "subprocess.CompletedProcess[str]"
) -> None:
    assert "\ndrawn and shown\n" in ended.stdout, ended.stderr[-3000:]
    assert "sizes" in (package.parent / "graph.svg").read_text()
    assert "(default: dr_grpo)" in ended.stdout
    assert "it is for other pipelines than 'watched': overlong, critic" in ended.stdout


def test_a_policy_family_that_is_added_as_the_steps_say_is_saved_and_loaded(
    ended: "subprocess.CompletedProcess[str]",
) -> None:
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.endswith("saved and loaded\n")


# in the suite, recipes/test_pages.py trains a family that is added to a run
@pytest.mark.proof
def test_a_policy_family_that_is_added_as_the_steps_say_is_trained(cousin: Path) -> None:
    package = cousin
    tests = package.parent / "families"
    tests.mkdir()
    for name in ("conftest.py", "test_learning_families.py"):
        shutil.copy(ROOT / "tests" / "models" / name, tests)
    test = tests / "test_learning_families.py"
    change(test, "from vla_rl.models.openvla import", "from vla_rl.models.cousin import")
    change(test, 'FAMILIES = ("openvla", ', 'FAMILIES = ("cousin", ')
    change(test, 'if family == "openvla"', 'if family == "cousin"')
    assert "2 passed" in run_tests(package, tests, "small_steps and cousin and float32")
