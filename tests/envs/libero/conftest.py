"""LIBERO with real assets: environments shared by the tests, and child processes that start while others run."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from vla_rl.envs.libero import LiberoEnv

SUPPORT = Path(__file__).parent / "support"
INIT_STATE_ID = 3


@pytest.fixture(scope="session")
def assets() -> str:
    folder = os.environ.get("VLA_RL_LIBERO_ASSETS", "")
    if not folder:
        pytest.skip("needs LIBERO's assets: set VLA_RL_LIBERO_ASSETS to their folder")
    return folder


@pytest.fixture(scope="session")
def actions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 60 random actions, float32; most tests play the first dozen."""
    path = tmp_path_factory.mktemp("libero") / "actions.npy"
    np.save(path, np.random.default_rng(5).uniform(-1, 1, (60, 7)).astype(np.float32))
    return path


@pytest.fixture(scope="session")
def reference(assets: str, actions: Path) -> Iterator[subprocess.Popen[str]]:
    """LIBERO's own environments, played from `INIT_STATE_ID` in another process; writes `reference.npz`."""
    out = str(actions.with_name("reference.npz"))
    yield from _child(SUPPORT / "robosuite_reference.py", str(INIT_STATE_ID), str(actions), out)


@pytest.fixture(scope="session")
def fresh(assets: str, actions: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """`LiberoEnv` on `libero_object` task 1 from `INIT_STATE_ID` in another process with an empty home folder."""
    out, home = str(actions.with_name("fresh.npz")), str(tmp_path_factory.mktemp("home"))
    yield from _child(SUPPORT / "fresh_process.py", "1", str(INIT_STATE_ID), str(actions), out, home=home)


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


def _child(script: Path, *arguments: str, home: str | None = None) -> Iterator[subprocess.Popen[str]]:
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
