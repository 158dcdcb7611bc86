"""LIBERO is loaded quietly, in any process, with or without what it imports and never uses."""

import _ctypes
import asyncio
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.env_workers.checked_env import CheckedEnv
from vla_rl.envs.libero import LiberoEnv
from vla_rl.envs.libero.loading import (
    check_mujoco_version,
    load_simulator,
    without_optional_modules,
)
from vla_rl.envs.libero.probe import probe_physics
from vla_rl.envs.mujoco import loading
from vla_rl.envs.mujoco.loading import _disable_asset_cache, device_order
from vla_rl.errors import EnvError
from vla_rl.types import EnvSpec, EpisodeSpec


def test_a_killed_process_leaves_no_folder_that_the_next_one_does_not_use(tmp_path: Path) -> None:
    code = """
import os
from vla_rl.envs.libero.loading import load_libero
from vla_rl.envs.libero.loading import load_simulator
load_simulator()  # once, for the two that are killed
for _ in range(2):
    child = os.fork()
    if child == 0:
        load_libero("libero")
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
os._exit(9)
"""
    environment = {key: value for key, value in os.environ.items() if key != "LIBERO_CONFIG_PATH"}
    cache = Path(tempfile.gettempdir()) / f"vla_rl-{os.getuid()}"
    warm = {"NUMBA_CACHE_DIR": str(cache / "numba"), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, **warm}, timeout=500, check=False
    )
    assert done.returncode == 9
    assert [folder.name for folder in tmp_path.iterdir()] == [f"vla_rl-{os.getuid()}"]
    (folder,) = (tmp_path / f"vla_rl-{os.getuid()}").glob("libero-*")
    assert [file.name for file in folder.iterdir()] == ["config.yaml"]


def _choose_graphics(**variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        k: v for k, v in os.environ.items() if k not in ("MUJOCO_GL", "PYOPENGL_PLATFORM")
    }
    code = (
        "from vla_rl.envs.mujoco.loading import choose_graphics, make_context;"
        "print(choose_graphics()); context = make_context(64); context.make_current(); "
        "context.free()"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, **variables},
    )


@pytest.mark.parametrize("version", ["3.3.0", "3.3.2"])
def test_the_mujoco_of_published_results_is_taken(version: str) -> None:
    check_mujoco_version(version)


@pytest.mark.parametrize("version", ["3.2.7", "3.3.3", "3.4.0", "3.8.1"])
def test_a_mujoco_with_other_physics_or_images_is_refused(version: str) -> None:
    with pytest.raises(EnvError, match=f"mujoco is {version}, expected >=3.3.0,<3.3.3.*ramekin"):
        check_mujoco_version(version)


def test_a_mujoco_without_the_function_that_frees_its_cache_is_still_loaded_and_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "libmujoco.so").symlink_to(_ctypes.__file__)  # a library without it
    _disable_asset_cache(types.SimpleNamespace(__file__=str(tmp_path / "__init__.py")))


def test_a_warning_of_mujocos_goes_to_stderr_and_into_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mujoco = load_simulator().mujoco
    model = mujoco.MjModel.from_xml_string(
        "<mujoco><worldbody><body><freejoint/><geom size='1'/></body></worldbody></mujoco>"
    )
    data = mujoco.MjData(model)
    data.qpos[0] = np.nan
    monkeypatch.chdir(tmp_path)
    mujoco.mj_step(model, data)
    assert "MuJoCo: Nan, Inf or huge value in QPOS" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_egl_draws_by_default() -> None:
    assert _choose_graphics().stdout.split() == ["egl"]


def test_osmesa_takes_over_where_egl_has_no_device() -> None:
    assert _choose_graphics(MUJOCO_EGL_DEVICE_ID="99").stdout.split() == ["osmesa"]


NO_OPENGL = {"MUJOCO_GL": "egl", "MUJOCO_EGL_DEVICE_ID": "99"}


def _run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=500
    )


# in the suite, the next test finds the same error, before an episode
@pytest.mark.proof
def test_an_environment_that_cannot_draw_says_so_at_its_first_image() -> None:
    done = _run(
        "from vla_rl.envs.libero import LiberoEnv; env = LiberoEnv('libero_object', "
        "assets='stand-ins');"
        "print('made'); env.reset()",
        **NO_OPENGL,
    )
    assert (done.returncode, done.stdout) == (1, "made\n")
    assert (
        "EnvError: no off-screen OpenGL works here "
        "(egl: MUJOCO_EGL_DEVICE_ID is '99'" in done.stderr
    )


@pytest.fixture
def no_opengl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as one that has not chosen a library yet, and will find none."""
    for name, value in NO_OPENGL.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(loading, "_spare_contexts", [])
    monkeypatch.setattr(loading, "_choosing_process", set())
    loading.choose_graphics.cache_clear()
    yield
    loading.choose_graphics.cache_clear()


@pytest.mark.usefixtures("no_opengl")
def test_without_any_opengl_the_error_names_the_packages() -> None:
    with pytest.raises(EnvError) as caught:
        loading.make_context(64)
    for part in (
        "MUJOCO_EGL_DEVICE_ID is '99', expected 0 to",
        "apt-get install libegl1 libgl1",
        "apt-get install libosmesa6",
    ):
        assert part in str(caught.value)


@pytest.mark.usefixtures("no_opengl")
def test_drawing_on_a_screen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    with pytest.raises(EnvError, match="MUJOCO_GL is 'glfw', expected 'egl' or 'osmesa'"):
        loading.make_context(64)


@pytest.mark.usefixtures("no_opengl")
def test_a_simulator_process_that_cannot_draw_says_so_before_an_episode() -> None:
    # a simulator process makes its environments as CheckedEnv
    kwargs = {"task_id": 1, "assets": "stand-ins"}
    with pytest.raises(EnvError, match="no off-screen OpenGL works here"):
        CheckedEnv(EnvSpec(id="vla_rl/libero_object-v0", kwargs=kwargs))


def test_a_fork_of_a_process_that_has_drawn_is_refused_instead_of_waiting_for_ever(
    object_env: LiberoEnv,
) -> None:
    object_env.reset(seed=0)
    from_child, to_parent = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside Mesa's threads
        child = os.fork()
    if child == 0:
        try:
            other = LiberoEnv("libero_object", task_id=1, assets="stand-ins", image_size=32)
            for draw in (object_env.reset, other.reset):
                try:
                    draw(seed=0)
                except EnvError as error:
                    os.write(to_parent, f"{error}\n".encode())
            object_env.close()
            os._exit(7)
        finally:
            os._exit(1)
    os.close(to_parent)
    with open(from_child) as said:
        refused = said.read().splitlines()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(refused) == 2
    assert all("fork before the first reset, or start processes with" in line for line in refused)
    object_env.reset(seed=0)


def test_a_missing_asset_file_is_named(assets: str, tmp_path: Path) -> None:
    copy = tmp_path / "assets"
    copy.mkdir()
    for entry in Path(assets).iterdir():
        if entry.name != "stable_hope_objects":
            (copy / entry.name).symlink_to(entry)
    shutil.copytree(
        Path(assets) / "stable_hope_objects", copy / "stable_hope_objects", symlinks=True
    )
    (copy / "stable_hope_objects" / "milk" / "milk.xml").unlink()
    with pytest.raises(
        FileNotFoundError,
        match=r"are incomplete: libero_object/7 needs .*milk\.xml.*VLA_RL_LIBERO_ASSETS",
    ):
        LiberoEnv("libero_object", task_id=7, assets=copy)


# in the suite, test_stand_ins.py::test_the_bowl_settles_on_the_ramekin, with narrower bounds
@pytest.mark.proof
def test_the_bowl_of_spatial_task_5_settles_on_the_ramekin(assets: str) -> None:
    resting = probe_physics(assets)
    assert resting.offset_m < 0.03
    assert 0.02 < resting.height_m < 0.06
    assert resting.speed < 0.01


SPEC = EnvSpec(
    id="vla_rl/libero_object-v0",
    kwargs={
        "task_id": 1,
        "assets": "stand-ins",
        "quality": "fast",
        "physics": "fast",
        "num_settle_steps": 2,
    },
)
UP = np.array([0, 0, 1, 0, 0, 0, -1], np.float32)


async def run_episode(
    pool: SimulatorPool, number: int, barrier: asyncio.Barrier
) -> tuple[int, Any]:
    """One step of the same episode, with the others at the same time."""
    episode = EpisodeSpec(
        episode_id=number, group_id=0, member=number, env=SPEC, task="t", seed=1, policy_seed=number,
        options={"init_state_id": 3},
    )  # fmt: skip
    async with pool.lease(episode) as env:
        await env.reset()
        await barrier.wait()
        return env.process.pid, (await env.step(UP))[0]


async def test_two_forks_of_one_scene_draw_the_same_episode_with_little_memory_of_their_own() -> (
    None
):
    async with (
        asyncio.timeout(590),
        Runtime(name="test") as runtime,
        SimulatorPool(runtime, SimulatorConfig(num_envs=2), specs=[SPEC]) as pool,
    ):
        barrier = asyncio.Barrier(2)
        (one, seen_by_one), (two, seen_by_two) = await asyncio.gather(
            *(run_episode(pool, k, barrier) for k in range(2))
        )
        assert one != two
        for key in ("image", "wrist_image", "state"):
            np.testing.assert_array_equal(seen_by_one[key], seen_by_two[key])
        assert seen_by_one["image"].std() > 10  # an image, and not a black one
        # with the scene and its simulator in each of them it is 600; Mesa's software renderer is
        # most of what is left
        assert pool.metrics()["simulation/private_mb_max"] < 170


@pytest.mark.parametrize(
    ("is_software", "process_index", "order"),
    [
        ([False, False, False, True], 0, [0, 1, 2, 3]),
        ([False, False, False, True], 1, [1, 2, 0, 3]),
        ([False, False, False, True], 5, [2, 0, 1, 3]),
        ([True, False, False], 1, [2, 1, 0]),
        ([True], 7, [0]),
        ([], 0, []),
    ],
)
def test_processes_take_the_gpus_in_turn_and_the_cpu_last(
    is_software: list[bool], process_index: int, order: list[int]
) -> None:
    assert device_order(is_software, process_index) == order


FAMILIES = ("gym", "wand", "wand.api", "wand.image", "skimage", "skimage.filters")


@pytest.fixture
def none_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.import_module

    def refused(name: str, package: str | None = None) -> object:
        if name.split(".")[0] in ("wand", "skimage"):
            raise ImportError(name)
        return found(name, package)

    for name in FAMILIES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(importlib, "import_module", refused)


@pytest.mark.usefixtures("none_installed")
def test_imports_succeed_inside_and_nothing_is_left_of_them() -> None:
    with without_optional_modules():
        from gym import Env  # noqa: F401
        from skimage.filters import gaussian  # noqa: F401
        from wand.api import library

        library.MagickMotionBlurImage.argtypes = ()  # as LIBERO-plus sets it
    assert not set(FAMILIES) & set(sys.modules)


@pytest.mark.usefixtures("none_installed")
def test_a_task_that_uses_one_is_told_what_to_install() -> None:
    with without_optional_modules():
        from skimage.filters import gaussian
        from wand.image import Image
    with pytest.raises(EnvError, match=r"motion blur .* `pip install Wand`"):
        Image(blob=b"")
    with pytest.raises(EnvError, match="needs scikit-image"):
        gaussian(None)
