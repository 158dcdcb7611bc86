"""LIBERO: environments shared by the tests, and child processes that start while others run.

Assets are the placeholder assets that ship, which build in a third of the time, unless
`VLA_RL_LIBERO_ASSETS` names others.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from vla_rl.envs import LIBERO_SUITES
from vla_rl.envs.libero import LiberoEnv
from vla_rl.envs.libero.assets import find_assets

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
EXPERT_EPISODE = SUPPORT / "expert_episode.npy"
"""float32 [91, 7], what a scripted expert did on `libero_object` task 1 from `INIT_STATE_ID`: the
last action succeeds."""

INIT_STATE_ID = 3
NEXT_FIXTURES = 1
"""Initial state of the trial that comes after the one with images, in the same environment."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first scene on a machine compiles for half a minute of CPU time, whichever test it is
    for.
    """
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture
def make_small_env() -> Iterator[Callable[..., gymnasium.Env[Any, np.ndarray]]]:
    """Makes `vla_rl/<name>-v0` with small, fast images of placeholder assets; closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(name: str, task_id: int, **kwargs: Any) -> gymnasium.Env[Any, np.ndarray]:
            assert LIBERO_SUITES  # imported, so that the names are known
            env: gymnasium.Env[Any, np.ndarray] = gymnasium.make(
                f"vla_rl/{name}-v0",
                task_id=task_id,
                assets="stand-ins",
                image_size=16,
                wrist_image=False,
                physics="fast",
                quality="fast",
                disable_env_checker=True,
                **kwargs,
            )
            return stack.enter_context(contextlib.closing(env))

        yield make


@pytest.fixture(scope="session")
def assets() -> str:
    return str(find_assets().path)


@pytest.fixture(scope="session")
def actions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 60 random actions, float32; most tests run the first dozen."""
    path = tmp_path_factory.mktemp("libero") / "actions.npy"
    np.save(path, np.random.default_rng(5).uniform(-1, 1, (60, 7)).astype(np.float32))
    return path


@pytest.fixture(scope="session")
def runs(assets: str, actions: Path) -> list[dict[str, Any]]:
    """What LIBERO's own environment runs and ours must repeat, with images and on to the next
    trial.
    """
    dozen = actions.with_name("dozen.npy")
    np.save(dozen, np.load(actions)[:12])
    return [
        {
            "init_state_id": INIT_STATE_ID,
            "assets": assets,
            "name": "images",
            "suite": "libero_goal",
            "task_id": 7,
            "actions": str(dozen),
            "has_images": True,
            "next_trial": NEXT_FIXTURES,
        },
    ]


@pytest.fixture(scope="session")
def other_runs(assets: str, actions: Path) -> list[dict[str, Any]]:
    """The same for each other suite, without images: a whole grasp, and random actions."""
    some = actions.with_name("some.npy")
    np.save(some, np.load(actions)[:30])
    common = {"init_state_id": INIT_STATE_ID, "assets": assets, "has_images": False}
    grasp = {"name": "grasp", "suite": "libero_object", "task_id": 1}
    spatial = {"name": "spatial", "suite": "libero_spatial", "task_id": 4}
    ten = {"name": "ten", "suite": "libero_10", "task_id": 3}
    return [
        {**common, **grasp, "actions": str(EXPERT_EPISODE)},
        {**common, **spatial, "actions": str(some)},
        {**common, **ten, "actions": str(some), "assets": str(find_assets("stand-ins").path)},
    ]


@pytest.fixture(scope="session")
def reference(runs: list[dict[str, Any]], actions: Path) -> Iterator[subprocess.Popen[str]]:
    """LIBERO's own environments, run in another process; writes `reference.npz`."""
    yield from _run_in_child(runs, actions.with_name("reference.npz"))


@pytest.fixture(scope="session")
def other_reference(
    other_runs: list[dict[str, Any]], actions: Path
) -> Iterator[subprocess.Popen[str]]:
    """The same of the other suites; writes `other_reference.npz`."""
    yield from _run_in_child(other_runs, actions.with_name("other_reference.npz"))


def _run_in_child(runs: list[dict[str, Any]], out: Path) -> Iterator[subprocess.Popen[str]]:
    specs = out.with_suffix(".json")
    specs.write_text(json.dumps(runs))
    yield from _child(SUPPORT / "robosuite_reference.py", str(specs), str(out))


@pytest.fixture(scope="session")
def fresh(
    assets: str, actions: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[str]]:
    """`LiberoEnv` on `libero_object` task 1 from `INIT_STATE_ID` in another process with an empty
    home folder.
    """
    out, home = str(actions.with_name("fresh.npz")), str(tmp_path_factory.mktemp("home"))
    yield from _child(
        SUPPORT / "own_process.py", "fresh", "1", str(INIT_STATE_ID), str(actions), out, home=home
    )


@pytest.fixture(scope="session")
def forked(assets: str, actions: Path) -> Iterator[subprocess.Popen[str]]:
    """The same episode in a fork of a process that has prepared the scene; writes `forked.npz`."""
    out = str(actions.with_name("forked.npz"))
    yield from _child(SUPPORT / "own_process.py", "forked", str(INIT_STATE_ID), str(actions), out)


@pytest.fixture(scope="session")
def object_env(assets: str) -> Iterator[LiberoEnv]:
    env = LiberoEnv("libero_object", task_id=1, image_size=96)
    yield env
    env.close()


@pytest.fixture(scope="session")
def goal_env(assets: str) -> Iterator[LiberoEnv]:
    env = LiberoEnv("libero_goal", task_id=7, image_size=96)
    yield env
    env.close()


def _child(
    script: Path, *arguments: str, home: str | None = None
) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"HOME": home} if home else {})}
    environment.pop("LIBERO_CONFIG_PATH", None)
    with subprocess.Popen(
        [sys.executable, "-W", "error", str(script), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        yield process
        process.kill()
