"""Meta-World's physics, experts, images, tasks are the package's own, with starts by number.

The package is that of vla_rl/requirements/metaworld.txt; without it these tests are skipped with the
command that installs it.
"""

import copy
import functools
import importlib.metadata
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

import vla_rl.envs
from vla_rl.cli.main import recipes
from vla_rl.env_workers.spaces import as_plain
from vla_rl.envs.metaworld import SUITES, MetaWorldEnv, find_task, list_tasks
from vla_rl.envs.metaworld.env import MetaWorldExpert, draw_sawyer_plainly
from vla_rl.envs.metaworld.scene import VERSION, Scene, load_metaworld
from vla_rl.envs.mujoco.loading import choose_graphics
from vla_rl.errors import EnvError, PackageError
from vla_rl.util.installing import REQUIREMENTS, pins

IN_THE_SUITE = ("door-lock", "pick-place", "stick-pull")
TASKS = [
    *IN_THE_SUITE,
    *(pytest.param(name, marks=pytest.mark.proof) for name in ("basketball", "drawer-open")),
]
NUM_STEPS = 40


@pytest.fixture(autouse=True, scope="session")
def metaworld() -> None:
    try:
        load_metaworld()
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def drawer_env() -> Iterator[MetaWorldEnv]:
    env = MetaWorldEnv("metaworld_mt10", "drawer-open", image_size=64, quality="fast")
    yield env
    env.close()


@functools.cache
def cached_scene(name: str, number: int = 0) -> Scene:
    """One scene for all tests of a task, which build it in a third of a second."""
    return Scene(find_task("metaworld_mt50", name))


def scene_at(name: str, start: int, number: int = 0) -> Scene:
    scene = cached_scene(name, number)
    scene.start_episode(start)
    return scene


def the_packages_own(scene: Scene) -> Any:
    """Meta-World's environment, put to the start of `scene` as its users do."""
    from metaworld.types import Task

    name = f"{scene.task_name}-v3"
    made = load_metaworld().envs[name]
    env = made()
    data = {
        "env_cls": made,
        "rand_vec": scene._env._last_rand_vec.copy(),
        "partially_observable": False,
    }
    env.set_task(Task(env_name=name, data=pickle.dumps(data)))
    return env


@pytest.mark.parametrize("name", TASKS)
def test_an_episode_is_the_packages_own_whatever_ran_before(name: str) -> None:
    scene = scene_at(name, 7)
    for _ in range(5):
        scene.run_control_step(np.full(4, 0.5))
    scene.start_episode(3)
    env, expert = the_packages_own(scene), MetaWorldExpert(scene)
    observation, _ = env.reset()
    np.testing.assert_array_equal(scene.observation, observation)
    for _ in range(NUM_STEPS):
        action = expert.act()
        is_success = scene.run_control_step(action.astype(np.float64))
        observation, reward, _, _, info = env.step(action)
        np.testing.assert_array_equal(scene.observation, observation)
        assert (scene.dense_reward, is_success) == (reward, bool(info["success"]))


@pytest.mark.parametrize("name", TASKS)
def test_a_restored_state_goes_on_with_the_same_bits(name: str) -> None:
    scene = scene_at(name, 3)
    expert = MetaWorldExpert(scene)
    for _ in range(NUM_STEPS):
        scene.run_control_step(expert.act().astype(np.float64))
    state = as_plain(scene.get_state(), "state")
    actions = np.random.default_rng(0).uniform(-1, 1, (20, 4))
    stayed = [seen_after(scene, action) for action in actions]
    other_scene = scene_at(name, 11, number=1)
    for other in (other_scene, scene):
        other.set_state(state)
        for action, expected in zip(actions, stayed, strict=True):
            for value, wanted in zip(seen_after(other, action), expected, strict=True):
                np.testing.assert_array_equal(value, wanted)


def seen_after(scene: Scene, action: np.ndarray) -> tuple[Any, ...]:
    is_success = scene.run_control_step(action)
    poses = [array.copy() for array in scene.drawn.values()]
    return is_success, scene.dense_reward, scene.observation.copy(), *poses


def test_different_numbers_are_different_starts() -> None:
    scene = cached_scene("pick-place")
    vectors = [scene._draw_vector(start) for start in (*range(50), 1000, 2**31 - 1)]
    assert len(np.unique(np.array(vectors), axis=0)) == len(vectors)


def test_a_task_of_two_suites_has_the_same_starts_in_both() -> None:
    of_ten = Scene(find_task("metaworld_mt10", "pick-place"))
    of_fifty = cached_scene("pick-place")
    np.testing.assert_array_equal(of_ten._draw_vector(5), of_fifty._draw_vector(5))


def test_the_first_image_shows_bodies_where_the_reset_put_them() -> None:
    scene = scene_at("drawer-open", 0)
    poses = {}
    for start in (0, 1):
        scene.start_episode(start)
        poses[start] = scene.drawn["geom_xpos"].copy()
        assert scene.model.body("drawer").pos == pytest.approx(scene._env.data.body("drawer").xpos)
    assert np.abs(poses[0] - poses[1]).max() > 0.01


@pytest.mark.parametrize(
    "task",
    [
        "drawer-open",
        "button-press-topdown",
        pytest.param("window-close", marks=pytest.mark.proof),
    ],
)
def test_an_expert_solves_its_task(task: str) -> None:
    env = MetaWorldEnv("metaworld_mt10", task, image_size=16, quality="fast", wrist_image=False)
    env.reset(options={"init_state_id": 0})
    env.render_every_step = False
    expert = MetaWorldExpert(env.scene)
    terminated = truncated = False
    while not (terminated or truncated):
        _, reward, terminated, truncated, info = env.step(expert.act())
    assert (terminated, reward, info["is_success"]) == (True, 1.0, True)
    env.close()


def test_suggestions_are_the_experts_actions(drawer_env: MetaWorldEnv) -> None:
    env = gymnasium.make(
        "vla_rl/metaworld_mt10-expert-v0", task_id="drawer-open", image_size=64, quality="fast"
    )
    drawer_env.reset(options={"init_state_id": 2})
    seen, _ = env.reset(options={"init_state_id": 2})
    expert = MetaWorldExpert(drawer_env.scene)
    for _ in range(3):
        np.testing.assert_array_equal(seen["expert_action"], expert.act())
        drawer_env.step(seen["expert_action"])
        seen = env.step(seen["expert_action"])[0]
    env.close()


SIZE = 96


def rendered(quality: str) -> MetaWorldEnv:
    env = MetaWorldEnv("metaworld_mt10", "drawer-open", image_size=SIZE, quality=quality)  # type: ignore[arg-type]
    env.render_every_step = False
    env.reset(options={"init_state_id": 3})
    for _ in range(10):
        env.step(np.array([0.5, 0.5, -0.5, 1.0], np.float32))
    return env


@pytest.fixture(scope="module")
def exact() -> Iterator[MetaWorldEnv]:
    env = rendered("exact")
    yield env
    env.close()


@pytest.fixture(scope="module")
def fast() -> Iterator[MetaWorldEnv]:
    env = rendered("fast")
    yield env
    env.close()


def test_an_exact_image_is_that_of_the_packages_renderer() -> None:
    choose_graphics()
    env = rendered("exact")
    model, data = env.scene.model, env.scene._env.data
    ours = {key: env._draw_now((key,))[0] for key in ("image", "wrist_image")}
    env._cameras.close()  # type: ignore[union-attr] # else two libraries would share its context
    renderer = MujocoRenderer(model, data, width=SIZE, height=SIZE)
    for key, camera, turns in (("image", "corner2", 2), ("wrist_image", "gripperPOV", 0)):
        renderer.camera_id = model.camera(camera).id
        expected = np.rot90(renderer.render("rgb_array"), turns)
        np.testing.assert_array_equal(ours[key], expected)
    renderer.close()
    env.close()


def test_a_fast_image_shows_the_same_scene(exact: MetaWorldEnv, fast: MetaWorldEnv) -> None:
    for key in ("image", "wrist_image"):
        (one,), (other,) = exact._draw_now((key,)), fast._draw_now((key,))
        difference = np.abs(one.astype(int) - other).max(axis=2)
        assert 0.0 < (difference > 40).mean() < 0.2  # edges, shadows and the robot


def test_drawing_changes_nothing_of_the_simulation(exact: MetaWorldEnv, fast: MetaWorldEnv) -> None:
    fast._draw_now(("image", "wrist_image"))
    state, other = fast.scene.get_state(), exact.scene.get_state()
    np.testing.assert_array_equal(state["physics"], other["physics"])
    for name in ("geom_type", "mesh_facenum", "geom_group", "geom_rgba"):
        np.testing.assert_array_equal(
            getattr(fast.scene.model, name), getattr(exact.scene.model, name)
        )


def test_the_robots_meshes_alone_have_fewer_triangles_and_the_same_outline() -> None:
    env = MetaWorldEnv("metaworld_mt50", "soccer")
    model = env.scene.model
    coarse = copy.copy(model)
    draw_sawyer_plainly(coarse)
    is_coarse = coarse.mesh_facenum < model.mesh_facenum
    assert coarse.mesh_facenum[is_coarse].sum() < 0.15 * model.mesh_facenum[is_coarse].sum()
    frame = model.mesh("soccer_frame").id
    assert not is_coarse[frame]
    assert model.mesh_facenum[frame] > 4000
    for mesh in np.flatnonzero(is_coarse):
        corners = [corners_of(each, mesh) for each in (model, coarse)]
        for end in (np.min, np.max):
            assert end(corners[0], axis=0) == pytest.approx(end(corners[1], axis=0), abs=0.025)
    env.close()


def corners_of(model: object, mesh: int) -> np.ndarray:
    first, number = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]  # type: ignore[attr-defined]
    faces = model.mesh_face[first : first + number]  # type: ignore[attr-defined]
    vertices: np.ndarray = model.mesh_vert[model.mesh_vertadr[mesh] :][faces.ravel()]  # type: ignore[attr-defined]
    return vertices


def test_the_suites_are_the_packages_own_in_its_order() -> None:
    from metaworld import env_dict

    own = {"metaworld_mt10": env_dict.MT10_V3, "metaworld_mt50": env_dict.MT50_V3}
    assert {suite: [f"{name}-v3" for name in names] for suite, names in SUITES.items()} == {
        suite: list(envs) for suite, envs in own.items()
    }
    assert set(own["metaworld_mt50"]) == set(load_metaworld().experts)
    assert tuple(SUITES) == vla_rl.envs.METAWORLD_SUITES


def test_a_task_is_found_by_number_and_by_name() -> None:
    assert find_task("metaworld_mt10", 4) == find_task("metaworld_mt10", "drawer-open-v3")
    assert find_task("metaworld_mt10", "drawer-open").key == "metaworld_mt10/4"
    assert all(task.instruction for task in list_tasks("metaworld_mt50"))


@pytest.mark.parametrize(
    ("suite", "task_id", "words"),
    [
        ("metaworld_mt99", 0, "suite is 'metaworld_mt99', expected one of metaworld_mt10"),
        ("metaworld_mt10", 10, "task_id is 10, expected 0 to 9"),
        ("metaworld_mt10", True, "task_id is True, expected 0 to 9"),
        ("metaworld_mt50", "drawer-opn", "did you mean 'drawer-open'"),
        ("metaworld_mt10", "hammer", "task_id is 'hammer'.*expected one of metaworld_mt10's tasks"),
    ],
)
def test_a_task_that_does_not_exist_is_refused(suite: str, task_id: int | str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gymnasium.make("vla_rl/metaworld-v0", suite=suite, task_id=task_id)


def test_a_start_beyond_the_list_is_refused(drawer_env: MetaWorldEnv) -> None:
    with pytest.raises(ValueError, match=r"init_state_id is 2147483648, expected 0 to 49, or up"):
        drawer_env.reset(options={"init_state_id": 1 << 31})


def test_a_state_of_another_task_or_quality_is_refused(drawer_env: MetaWorldEnv) -> None:
    drawer_env.reset(seed=0)
    state = drawer_env.get_state()
    with pytest.raises(ValueError, match="the state is one of metaworld_mt10/5"):
        drawer_env.set_state({**state, "task": "metaworld_mt10/5"})
    with pytest.raises(ValueError, match="quality='exact'"):
        drawer_env.set_state({**state, "quality": "exact"})


def test_a_bad_action_is_refused(drawer_env: MetaWorldEnv) -> None:
    drawer_env.reset(seed=0)
    with pytest.raises(ValueError, match=r"shape \(7,\), expected \(4,\)"):
        drawer_env.step(np.zeros(7, np.float32))


@pytest.fixture
def nothing_loaded() -> Iterator[None]:
    load_metaworld.cache_clear()
    yield
    load_metaworld.cache_clear()


def test_another_version_is_refused_with_the_command_that_helps(
    nothing_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "3.1.1")
    with pytest.raises(EnvError, match=r"metaworld is 3.1.1, expected 3.0.0.*metaworld==3.0.0"):
        load_metaworld()


def test_a_missing_package_is_reported_with_the_command_that_installs_it(
    nothing_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    # an EnvError too, which recipes print in one line
    with pytest.raises(PackageError, match="Meta-World is not installed; run `pip install"):
        load_metaworld()


def test_the_pin_is_the_version_that_is_accepted() -> None:
    assert pins(REQUIREMENTS / "metaworld.txt") == [f"metaworld=={VERSION}"]


ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "metaworld.md").read_text()
GUIDE = (ROOT / "docs" / "add_a_simulator.md").read_text()


def test_the_block_of_the_page_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(block, names)
    assert names["info"]["task"] == "metaworld_mt50/19"  # type: ignore[index]
    names["env"].close()  # type: ignore[attr-defined]


def test_the_table_of_experts_has_every_task_once() -> None:
    rows = re.findall(r"(\d+) \| ([a-z-]+) \| (\d+)/50 \| \d+", PAGE)
    assert [name for _, name, _ in sorted(rows, key=lambda row: int(row[0]))] == list(
        SUITES["metaworld_mt50"]
    )
    assert f"{sum(int(solved) for *_, solved in rows)} of 2500" in PAGE


@pytest.mark.parametrize("page", [PAGE, GUIDE], ids=["metaworld", "add_a_simulator"])
def test_files_links_and_recipes_that_a_page_names_exist(page: str) -> None:
    paths = set(re.findall(r"`((?:vla_rl|tests|docs|scripts|envs)/[\w/.]*)`", page))
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([\w/.#-]+)\)", page)}
    assert not [link for link in sorted(links) if link and not (ROOT / "docs" / link).exists()]
    named = set(re.findall(r"vla-rl (\w+)", page)) - {"install"}
    assert named <= set(recipes())
