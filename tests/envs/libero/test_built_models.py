"""Models are built once on a machine, and read again bit by bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.envs.libero import building
from vla_rl.envs.libero.building import build_model
from vla_rl.envs.libero.loading import load_simulator

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


def kept_in(folder: Path) -> list[Path]:
    return sorted((folder / "models").iterdir())


def test_a_kept_model_has_every_bit_of_the_built_one(
    folder: Path, xml: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = bits_of(build_model(xml))
    (kept,) = kept_in(folder)
    monkeypatch.setattr(building, "_write_model", None)  # nothing is built again
    assert bits_of(build_model(xml)) == built == kept.read_bytes()


def test_a_mesh_that_changed_is_built_anew(folder: Path, xml: str) -> None:
    low = build_model(xml)
    (folder / "mesh.obj").write_text(TETRAHEDRON.format(height=2.5))
    high = build_model(xml)
    assert np.ptp(low.mesh_vert[:, 2]) < np.ptp(high.mesh_vert[:, 2])
    assert len(kept_in(folder)) == 2


def test_a_damaged_file_is_built_anew_and_replaced(folder: Path, xml: str) -> None:
    built = bits_of(build_model(xml))
    (kept,) = kept_in(folder)
    kept.write_bytes(b"not a model")
    assert bits_of(build_model(xml)) == built == kept.read_bytes()


def test_models_that_were_not_used_for_longest_make_room(
    folder: Path, xml: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_model(xml)
    (first,) = kept_in(folder)
    monkeypatch.setattr(building, "_MAX_CACHE_BYTES", int(1.5 * first.stat().st_size))
    build_model(xml.replace("thing", "other"))
    (second,) = kept_in(folder)
    assert second != first


def test_a_model_that_would_take_all_the_room_is_not_kept(
    folder: Path, xml: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "_MAX_MODEL_BYTES", 1000)
    build_model(xml)
    assert kept_in(folder) == []


def test_a_mesh_that_is_not_there_is_mujocos_error(folder: Path, xml: str) -> None:
    (folder / "mesh.obj").unlink()
    with pytest.raises(ValueError, match="Error opening file"):
        build_model(xml)
