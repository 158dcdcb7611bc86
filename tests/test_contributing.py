"""CONTRIBUTING.md names files, targets and names that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
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


def test_the_readme_leads_to_the_files_that_people_look_for() -> None:
    assert "(CONTRIBUTING.md)" in (ROOT / "README.md").read_text()
    table = PAGE.partition("## Where things are")[2].partition("\n## ")[0]
    files = re.findall(r"^\| [^|]+ \| `([\w/.]+)`", table, re.MULTILINE)
    holds = ("def clipped_surrogate", "class Pipeline", "Replacements(", "apply", "class Learner")
    assert len(files) >= len(holds)
    for path, name in zip(files, holds, strict=False):
        assert name in (ROOT / path).read_text(), (path, name)


@pytest.mark.parametrize(
    ("recipe", "path", "names"),
    [
        (
            "Add a loss",
            "vla_rl/algorithms/losses/declaration.py",
            ["declare_loss", "Parameter", "LossResult", "DeclaredLoss", "has_trust_region"],
        ),
        (
            "Add a loss",
            "tests/algorithms/losses/test_loss_gradients.py",
            ["WITH_STOPPED_GRADIENTS"],
        ),
        ("Add an environment", "vla_rl/envs/__init__.py", ["_register("]),
        ("Add an environment", "tests/contracts/test_env_contract.py", ["CASES", "Case"]),
        (
            "Add a policy family",
            "vla_rl/models/loading.py",
            ["Family", "CheckpointFormat", "policy_family", "load_policy"],
        ),
        ("Add a pipeline", "vla_rl/pipelines/__init__.py", ["PIPELINES", "SETTINGS"]),
        ("Add a pipeline", "tests/pipelines/test_pipelines.py", ["NEEDS_IMAGES"]),
    ],
)
def test_a_recipe_names_what_stands_in_its_files(recipe: str, path: str, names: list[str]) -> None:
    assert path.rpartition("/")[2] in RECIPES[recipe]
    text = (ROOT / path).read_text()
    for name in names:
        assert name in RECIPES[recipe], name
        assert name in text, name
