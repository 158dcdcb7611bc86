"""What is dear is made once: scenes and cameras in a process, models and compiled code on a machine."""

import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest

from vla_rl.envs.libero import building, scene, stepping
from vla_rl.envs.libero.building import build_model
from vla_rl.envs.libero.loading import load_simulator
from vla_rl.envs.libero.scene import (
    CameraKey,
    SceneKey,
    prepare_scene,
    release_cameras,
    release_scene,
    take_cameras,
    take_scene,
)
from vla_rl.envs.libero.stepping import call_compiled


class Scene:
    """Notes what is asked of it, which takes no simulator."""

    def __init__(self, *key: object) -> None:
        self.num_begins, self.advanced_by, self.is_closed = 0, list[str](), False
        self.physics = ""

    def start_episode(self, state: object) -> None:
        self.num_begins += 1

    def run_control_step(self, action: np.ndarray) -> None:
        self.advanced_by.append(self.physics)

    def close(self) -> None:
        self.is_closed = True


class Task:
    """All that is read of a task."""

    init_states_file = Path("states")


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> SceneKey:
    monkeypatch.setattr(scene, "Scene", Scene)
    monkeypatch.setattr(scene, "read_init_states", lambda file: [None])
    monkeypatch.setattr(scene, "_prepared", {})
    monkeypatch.setattr(scene, "_in_use", set())
    monkeypatch.setattr(scene, "_spare_cameras", {})
    task: Any = Task()
    return SceneKey(task, Path("assets"), scene_seed=0)


def test_a_scene_is_prepared_once_and_has_run_a_step_of_each_physics(key: SceneKey) -> None:
    scene: Any = prepare_scene(key)
    assert prepare_scene(key) is scene
    assert (scene.num_begins, scene.advanced_by) == (1, ["exact", "fast"])


def test_a_prepared_scene_serves_one_environment_at_a_time(key: SceneKey) -> None:
    kept = prepare_scene(key)
    assert take_scene(key) is kept
    other: Any = take_scene(key)
    assert other is not kept
    release_scene(key, other)
    assert other.is_closed
    release_scene(key, kept)
    assert take_scene(key) is kept


class Cameras:
    """Notes what is asked of it, which takes no OpenGL."""

    def __init__(self, num_bytes: int, is_lost: bool = False) -> None:
        self.num_bytes, self.is_lost, self.asked = num_bytes, is_lost, list[str]()

    def suspend_look(self) -> None:
        self.asked.append("rest")

    def resume_look(self) -> None:
        self.asked.append("resume")

    def close(self) -> None:
        self.asked.append("close")


SMALL = CameraKey(("agentview",), 84, "fast", thread=1)


def test_waiting_cameras_serve_only_what_they_draw_and_their_thread(key: SceneKey) -> None:
    scene = prepare_scene(key)
    for other in (
        SMALL._replace(size=96),
        SMALL._replace(quality="exact"),
        SMALL._replace(thread=2),
    ):
        cameras: Any = Cameras(1)
        release_cameras(key, scene, SMALL, cameras)
        assert take_cameras(key, scene, other) is None
        assert cameras.asked == ["rest", "close"]
    again: Any = Cameras(1)
    release_cameras(key, scene, SMALL, again)
    assert take_cameras(key, scene, SMALL) is again
    assert again.asked == ["rest", "resume"]
    assert take_cameras(key, scene, SMALL) is None


def test_cameras_that_were_lost_or_are_of_another_scene_are_closed(key: SceneKey) -> None:
    scene, other = prepare_scene(key), take_scene(key)
    lost: Any = Cameras(1, is_lost=True)
    release_cameras(key, scene, SMALL, lost)
    unkept: Any = Cameras(1)
    release_cameras(key, take_scene(key), SMALL, unkept)
    assert other is scene
    assert (lost.asked, unkept.asked) == (["close"], ["close"])


def test_the_longest_waiting_cameras_are_closed_if_there_is_no_room(key: SceneKey) -> None:
    keys = [key._replace(scene_seed=seed) for seed in range(4)]
    waiting: list[Any] = [Cameras(100 * 2**20) for _ in keys]
    for each, cameras in zip(keys, waiting, strict=True):
        release_cameras(each, prepare_scene(each), SMALL, cameras)
    assert [cameras.asked for cameras in waiting] == [
        ["rest", "close"],
        ["rest", "close"],
        ["rest"],
        ["rest"],
    ]
    huge: Any = Cameras(300 * 2**20)
    release_cameras(key, prepare_scene(key), SMALL, huge)
    assert huge.asked == ["close"]


def test_a_scene_that_was_not_prepared_is_freed_with_its_environment(key: SceneKey) -> None:
    scene: Any = take_scene(key)
    release_scene(key, scene)
    assert scene.is_closed


TETRAHEDRON = "v 0 0 0\nv 1 0 0\nv 0 1 0\nv 0 0 {height}\nf 1 3 2\nf 1 2 4\nf 2 3 4\nf 1 4 3\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(building, "cache_folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def xml(tmp_path: Path) -> str:
    """A body with a mesh of a file."""
    mesh = tmp_path / "mesh.obj"
    mesh.write_text(TETRAHEDRON.format(height=1))
    return (
        f'<mujoco><asset><mesh name="thing" file="{mesh}"/></asset><worldbody><body>'
        '<freejoint/><geom type="mesh" mesh="thing"/></body></worldbody></mujoco>'
    )


def bits_of(model: Any) -> bytes:
    mujoco = load_simulator().mujoco
    data = np.zeros(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, data)
    return data.tobytes()


def list_models(folder: Path) -> list[Path]:
    return sorted((folder / "models").iterdir())


def test_a_cached_model_has_every_bit_of_the_built_one(
    folder: Path, xml: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = bits_of(build_model(xml))
    (kept,) = list_models(folder)
    monkeypatch.setattr(building, "_write_model", None)  # nothing is built again
    assert bits_of(build_model(xml)) == built == kept.read_bytes()


def test_a_mesh_that_changed_is_built_anew(folder: Path, xml: str) -> None:
    low = build_model(xml)
    (folder / "mesh.obj").write_text(TETRAHEDRON.format(height=2.5))
    high = build_model(xml)
    assert np.ptp(low.mesh_vert[:, 2]) < np.ptp(high.mesh_vert[:, 2])
    assert len(list_models(folder)) == 2


def test_a_damaged_file_is_built_anew_and_replaced(folder: Path, xml: str) -> None:
    built = bits_of(build_model(xml))
    (kept,) = list_models(folder)
    kept.write_bytes(b"not a model")
    assert bits_of(build_model(xml)) == built == kept.read_bytes()


def test_models_that_were_not_used_for_longest_make_room(
    folder: Path, xml: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_model(xml)
    (first,) = list_models(folder)
    monkeypatch.setattr(building, "_MAX_CACHE_BYTES", int(1.5 * first.stat().st_size))
    build_model(xml.replace("thing", "other"))
    (second,) = list_models(folder)
    assert second != first


def test_a_model_that_would_take_all_the_room_is_not_cached(
    folder: Path, xml: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "_MAX_MODEL_BYTES", 1000)
    build_model(xml)
    assert list_models(folder) == []


def test_a_mesh_that_is_not_there_is_mujocos_error(folder: Path, xml: str) -> None:
    (folder / "mesh.obj").unlink()
    with pytest.raises(ValueError, match="Error opening file"):
        build_model(xml)


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    """The lock, as another process has it open."""
    monkeypatch.setattr(stepping, "cache_folder", lambda: tmp_path)
    with (tmp_path / "compiling.lock").open("w") as lock:
        yield lock


def is_free(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(lock, fcntl.LOCK_UN)
    return True


class Code:
    """A function as numba keeps it: its overloads are there from the first call on."""

    def __init__(self, lock: TextIO) -> None:
        self.overloads: dict[str, object] = {}
        self._lock = lock

    def __call__(self) -> bool:
        """Return whether another process could compile now."""
        self.overloads["()"] = None
        return is_free(self._lock)


def test_the_first_call_of_a_process_compiles_alone(lock: TextIO) -> None:
    code = Code(lock)
    assert not call_compiled(code)
    assert is_free(lock)
    assert call_compiled(code), "there is nothing left to compile"


def test_a_process_that_is_stopped_while_it_compiles_delays_others_and_no_more(
    lock: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepping, "COMPILE_WAIT_S", 0.01)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert call_compiled(Code(lock))  # the same open file: its own lock is no obstacle to it
