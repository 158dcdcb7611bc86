"""What the demo does not import is left to extras, and an error names the command that brings it."""

import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vla_rl.errors import ConfigError
from vla_rl.util.extras import EXTRA_BY_MODULE, EXTRAS, ExtraFinder, MissingExtra, install
from vla_rl.util.installing import INSTALLABLE, extra

ROOT = Path(__file__).parents[2]

WITHOUT_EXTRAS = """
import sys
from importlib.machinery import PathFinder
from vla_rl.util.extras import EXTRA_BY_MODULE

class Without:
    find_distributions = PathFinder.find_distributions

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in EXTRA_BY_MODULE:
            return PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""


def run_without_extras(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS + code], capture_output=True, text=True, check=False
    )


def test_every_recipe_can_be_asked_for_help_without_extras() -> None:
    done = run_without_extras(
        "from importlib import import_module\n"
        "from vla_rl.cli.main import recipes\n"
        "print(len([import_module(f'vla_rl.recipes.{name}') for name in recipes()]) > 10)"
    )
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


@pytest.mark.parametrize(
    ("code", "module", "extra_name"),
    [
        ("from vla_rl.datasets.prompts import read_prompts; read_prompts(FILE)", "pyarrow", "data"),
        ("import vla_rl.datasets.lerobot.tables as tables; tables.pa.array", "pyarrow", "data"),
        ("import vla_rl.endpoint", "aiohttp", "text"),
        ("import vla_rl.scoring.math_answers", "math_verify", "text"),
    ],
)  # fmt: skip
def test_an_import_that_lacks_an_extra_names_its_command(
    code: str, module: str, extra_name: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"PAR1")
    done = run_without_extras(f"FILE = {str(file)!r}\n{code}")
    assert done.stderr.splitlines()[-1].endswith(
        f"MissingExtra: {module} is not installed, expected for what was asked; "
        f"run `vla-rl install {extra_name}`."
    )


def test_a_missing_extra_is_a_mistake_of_the_configuration_and_an_import_error() -> None:
    assert issubclass(MissingExtra, ConfigError)
    assert issubclass(MissingExtra, ModuleNotFoundError)


def test_packages_that_only_look_for_one_are_told_that_it_is_not_there() -> None:
    done = run_without_extras("from importlib.util import find_spec; print(find_spec('pyarrow'))")
    assert done.stdout == "None\n"


def test_the_finder_is_asked_last_and_stands_once() -> None:
    install()
    assert sum(isinstance(finder, ExtraFinder) for finder in sys.meta_path) == 1
    assert isinstance(sys.meta_path[-1], ExtraFinder)


def test_the_extras_are_those_of_the_project_and_of_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, modules in EXTRAS.items():
        assert INSTALLABLE[name] is None
        wanted = project["optional-dependencies"][name]
        assert [Requirement(each) for each in extra(name)] == [Requirement(each) for each in wanted]
        assert len(wanted) == len(modules)
        assert not {Requirement(each).name for each in wanted} & {
            Requirement(each).name for each in project["dependencies"]
        }
    assert all(find_spec(module) for module in EXTRA_BY_MODULE)
