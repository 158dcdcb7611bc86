"""`import vla_rl` is enough for `gymnasium.make`, and costs gymnasium's import next to nothing."""

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GROUP = "gymnasium.envs"
LIGHT = {
    "vla_rl",
    "vla_rl.env_ids",
    "vla_rl.envs",
    "vla_rl.errors",
    "vla_rl.util.lazy_names",
    "vla_rl.util.torchvision_operators",
    "vla_rl.util",
    "vla_rl.util.extras",
    "vla_rl.util.watched_imports",
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
