"""Physics and assets that are damaged are named: each test makes one fault happen."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from faults import PATIENT, words, write_module

from vla_rl.cli.doctor import (
    Patient,
    physics,
)
from vla_rl.cli.doctor.trial import try_apart


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libero") is None, reason="needs LIBERO")
def test_physics_in_which_the_bowl_does_not_rest_is_named(first_on_path: Path) -> None:
    # gravity that pulls aside as well: the bowl slides off
    changed = (
        "from vla_rl.envs.libero.scene import Scene\n"
        "begin = Scene.begin\n"
        "def aside(scene, *args):\n"
        "    begin(scene, *args)\n"
        "    scene.model.opt.gravity[0] = 9.0\n"
        "Scene.begin = aside\n"
    )
    write_module(first_on_path, "sitecustomize", changed)
    found = words(physics.bowl_that_settles(Patient(seconds=200.0)))
    assert "does not rest on the ramekin" in found
    assert "mujoco>=3.3.0,<3.3.3" in found


def test_a_shipped_policy_with_one_wrong_byte_is_named(
    tmp_path: Path, policy_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(physics, "SHIPPED", tmp_path)
    monkeypatch.setattr(physics, "WHEELS", ())
    assert "damaged" not in words(physics.assets_with_digests(PATIENT))
    weights = policy_copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "model.safetensors" in words(physics.assets_with_digests(PATIENT))


@pytest.mark.skipif(find_spec("libero") is None, reason="needs LIBERO")
def test_a_folder_of_assets_that_lacks_some_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scenes").mkdir()
    monkeypatch.setattr(physics, "WHEELS", ())
    monkeypatch.setenv("VLA_RL_LIBERO_ASSETS", str(tmp_path))
    assert "no textures/ in it" in words(physics.assets_with_digests(PATIENT))
    found = words(physics.bowl_that_settles(Patient(seconds=200.0)))
    assert "no textures/ in it" in found
    assert "mujoco" not in found  # the physics is not at fault


def test_a_damaged_file_of_an_installed_package_is_named(first_on_path: Path) -> None:
    folder = first_on_path / "meshes-1.0.dist-info"
    folder.mkdir()
    (first_on_path / "bowl.obj").write_text("flat")
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: meshes\nVersion: 1.0\n")
    digest = "47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"  # of no bytes at all
    (folder / "RECORD").write_text(f"bowl.obj,sha256={digest},4\n")
    code = (
        "from vla_rl.cli.doctor.physics import damaged_in_wheel as d; print(d('meshes'), d('none'))"
    )
    assert try_apart(["-c", code], 60.0).words == "bowl.obj None"
