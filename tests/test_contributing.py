"""CONTRIBUTING.md names files, targets and names that exist."""

import ast
import re
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
