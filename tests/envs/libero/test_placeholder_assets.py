"""The placeholder assets: complete, reproducible, at rest, and solid enough to be played with."""

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
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
from vla_rl.envs.libero import Task, find_task, list_tasks
from vla_rl.envs.libero.assets import PLACEHOLDER_ASSETS, find_assets
from vla_rl.envs.libero.env import IDLE_ACTION
from vla_rl.envs.libero.experts.picking import MAX_WIDTH_M
from vla_rl.envs.libero.loading import load_simulator
from vla_rl.envs.libero.probe import probe_physics
from vla_rl.envs.libero.scene import Scene
from vla_rl.envs.libero.task_files import read_init_states

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
