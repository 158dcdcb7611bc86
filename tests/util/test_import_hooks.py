"""Imports of torchvision, gymnasium, modules of extras are changed once vla_rl is imported."""

import importlib
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from vla_rl.errors import ConfigError
from vla_rl.util.import_hooks import (
    EXTRA_BY_MODULE,
    EXTRAS,
    Execute,
    ExtraFinder,
    MissingExtra,
    WatchedImports,
    explain_missing_extras,
)
from vla_rl.util.installing import INSTALLABLE, extra


@pytest.fixture
def watched(import_folder: Path) -> Iterator[WatchedImports]:
    (import_folder / "watched_sample.py").write_text("NUMBER = 1\n")
    (import_folder / "other_sample.py").write_text("NUMBER = 1\n")
    finder = WatchedImports()
    sys.meta_path.insert(0, finder)
    importlib.invalidate_caches()
    yield finder
    sys.meta_path.remove(finder)


def doubled(execute: Execute, module: ModuleType) -> None:
    execute(module)
    module.NUMBER *= 2


def test_the_watched_module_is_executed_in_the_given_way(watched: WatchedImports) -> None:
    watched.watch("watched_sample", doubled)
    assert importlib.import_module("watched_sample").NUMBER == 2
    assert importlib.import_module("other_sample").NUMBER == 1


def test_a_second_import_does_not_execute_it_again(watched: WatchedImports) -> None:
    watched.watch("watched_sample", doubled)
    importlib.import_module("watched_sample")
    assert importlib.import_module("watched_sample").NUMBER == 2


def test_a_watched_module_that_is_not_there_is_not_found(watched: WatchedImports) -> None:
    watched.watch("no_such_sample", doubled)
    with pytest.raises(ModuleNotFoundError, match="no_such_sample"):
        importlib.import_module("no_such_sample")


def test_an_error_of_the_changed_execution_is_that_of_the_import(watched: WatchedImports) -> None:
    def broken(execute: Execute, module: ModuleType) -> None:
        raise ImportError("it does not fit")

    watched.watch("watched_sample", broken)
    with pytest.raises(ImportError, match="it does not fit"):
        importlib.import_module("watched_sample")
    assert "watched_sample" not in sys.modules


ORDERS = {
    "torch, vla_rl, then timm": "import torch, vla_rl, timm; timm.create_model('resnet10t')",
    "transformers, vla_rl, then what brings torchvision": """
import transformers, vla_rl
from transformers import AutoProcessor, AutoVideoProcessor, LlamaForCausalLM
""",
    "vla_rl, then networks and processors of images": """
import vla_rl
from transformers import AutoModelForImageTextToText, Qwen2_5_VLForConditionalGeneration
from transformers import Idefics3ForConditionalGeneration, SmolVLMForConditionalGeneration
from transformers import Idefics3Processor, Qwen3VLForConditionalGeneration, Qwen3VLProcessor
from transformers import SmolVLMImageProcessor
""",
    "torchvision in vain, then vla_rl": """
try:
    import torchvision
except RuntimeError as error:
    assert "torchvision::" in str(error)
import vla_rl, torchvision
assert torchvision.__version__
""",
}


EACH_IN_A_FORK = """
import json, os, sys, traceback
# The first import of every order, and a part of torch that torchvision imports: once for all.
import torch, torch._dynamo
for name, order in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        try:
            exec(order, {})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(json.dumps([name, os.waitstatus_to_exitcode(os.wait()[1])]), flush=True)
"""


@pytest.fixture(scope="module")
def ended() -> dict[str, int]:
    """Exit status of each order; errors are in the output that pytest has captured."""
    done = subprocess.run(
        [sys.executable, "-c", EACH_IN_A_FORK, json.dumps(ORDERS)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    print(done.stderr)
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("order", ORDERS)
def test_torchvision_imports_after_vla_rl(order: str, ended: dict[str, int]) -> None:
    assert ended[order] == 0


def test_importing_vla_rl_or_looking_for_torchvision_brings_no_torch() -> None:
    code = """
import sys, vla_rl
from importlib.util import find_spec
print(bool(find_spec("torchvision")), "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["True", "False"]


def test_another_error_of_torchvision_is_raised_as_it_is() -> None:
    code = """
import sys, vla_rl, importlib.abc, importlib.machinery

class Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "torchvision" else None

    def exec_module(self, module):
        raise RuntimeError("no such library")

sys.meta_path.insert(1, Broken())
try:
    import torchvision
except RuntimeError as error:
    print(error, "torchvision" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "no such library False"


ROOT = Path(__file__).parents[2]

WITHOUT_EXTRAS = """
import sys
from importlib.machinery import PathFinder
from vla_rl.util.import_hooks import EXTRA_BY_MODULE

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
    explain_missing_extras()
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


GROUP = "gymnasium.envs"
LIGHT = {
    "vla_rl",
    "vla_rl.envs",
    "vla_rl.errors",
    "vla_rl.util",
    "vla_rl.util.import_hooks",
    "vla_rl.util.imports",
}
LOOK = """
import sys
mine = {name for name in sys.modules if name.split(".")[0] == "vla_rl"}
heavy = sorted({"torch", "mujoco", "robosuite", "msgspec", "cv2"} & set(sys.modules))
import gymnasium
assert "vla_rl/libero_goal-v0" in gymnasium.registry
env = gymnasium.make("vla_rl/toy_reach-v0", task_id=0)
env.reset(seed=0)
print(env.spec.id, heavy, " ".join(sorted(mine)))
"""
"""What was imported until then, and one environment made by its id alone."""


def printed_by(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code + LOOK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "imports", ["import gymnasium, vla_rl", "import vla_rl, gymnasium", "import vla_rl.envs"]
)
def test_an_id_is_known_once_vla_rl_is_imported_before_gymnasium_or_after_it(imports: str) -> None:
    expected = f"vla_rl/toy_reach-v0 [] {' '.join(sorted(LIGHT))}\n"
    assert printed_by(imports) == expected


def test_gymnasium_itself_imports_vla_rl_for_an_id_with_a_module() -> None:
    code = "import gymnasium; gymnasium.make('vla_rl:vla_rl/toy_reach-v0')"
    assert printed_by(code).startswith("vla_rl/toy_reach-v0 ")


def test_a_program_that_loads_gymnasiums_entry_points_finds_the_ids_and_imports_little() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"][GROUP].items()
    assert name == "__root__"  # gymnasium 0.29 would put another name before each id
    entry = repr(EntryPoint(name=name, value=value, group=GROUP))
    code = f"import gymnasium; from importlib.metadata import EntryPoint; {entry}.load()()"
    expected = f"vla_rl/toy_reach-v0 [] {' '.join(sorted(LIGHT))}\n"
    assert printed_by(code) == expected
