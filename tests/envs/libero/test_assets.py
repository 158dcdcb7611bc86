"""Which assets are taken, and how everybody learns of it where they are stand-ins."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vla_rl.envs.libero import LiberoEnv, assets, download_assets
from vla_rl.envs.libero.assets import ASSETS_VARIABLE, STAND_INS, Assets, find_assets

MARK = "VLA_RL_STAND_INS_ANNOUNCED"


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any of LIBERO's own assets, on which stand-ins were announced already."""
    monkeypatch.delenv(ASSETS_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(MARK, "1")
    monkeypatch.setattr(assets, "libero_root", lambda: tmp_path / "libero")
    return tmp_path


def _folder(path: Path) -> Path:
    (path / "scenes").mkdir(parents=True)
    (path / "textures").mkdir()
    return path.resolve()


def test_the_nearest_assets_are_taken(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = find_assets()
    assert shipped.source == STAND_INS
    assert (shipped.path / "scenes" / "libero_study_base_style.xml").is_file()
    downloaded = _folder(nowhere / "home" / ".cache" / "libero" / "assets")
    assert find_assets() == Assets(downloaded, "hf-libero")
    package = _folder(nowhere / "libero" / "assets")
    assert find_assets() == Assets(package, "package")
    named = _folder(nowhere / "named")
    monkeypatch.setenv(ASSETS_VARIABLE, str(named))
    assert find_assets() == Assets(named, "configured")
    argument = _folder(nowhere / "argument")
    assert find_assets(argument) == Assets(argument, "configured")


def test_stand_ins_can_be_asked_for_where_there_are_others(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ASSETS_VARIABLE, str(_folder(nowhere / "named")))
    assert find_assets("stand-ins").source == STAND_INS
    monkeypatch.setenv(ASSETS_VARIABLE, "stand-ins")
    assert find_assets().source == STAND_INS


def test_a_copy_of_the_stand_ins_is_known_for_what_it_is(nowhere: Path) -> None:
    copy = shutil.copytree(find_assets(STAND_INS).path, nowhere / "copy")
    assert find_assets(copy) == Assets(copy.resolve(), STAND_INS)


def test_a_folder_that_was_asked_for_is_never_replaced(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ASSETS_VARIABLE, str(nowhere / "gone"))
    with pytest.raises(FileNotFoundError, match=r"gone \(no such folder\).*download_assets.*`stand-ins`"):
        find_assets()


def test_a_file_that_a_task_needs_and_a_folder_lacks_is_named(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copytree(find_assets(STAND_INS).path, nowhere / "copy")
    (copy / "stable_hope_objects" / "milk" / "milk.xml").unlink()
    monkeypatch.undo()
    monkeypatch.setenv(MARK, "1")
    with pytest.raises(FileNotFoundError, match=r"not complete: libero_object/7 needs .*milk\.xml"):
        LiberoEnv("libero_object", task_id=7, assets=copy)


def test_results_with_stand_ins_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "1")
    env = LiberoEnv("libero_object", task_id=7, assets=STAND_INS, image_size=32, wrist_image=False)
    try:
        _, info = env.reset(options={"init_state_id": 0})
        assert info["assets"] == "stand-ins"
    finally:
        env.close()


def test_stand_ins_are_announced_in_one_line_for_a_whole_tree_of_processes(tmp_path: Path) -> None:
    code = "from vla_rl.envs.libero.assets import find_assets as find; find(); find()"
    family = f"{code}; import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    environment = {**os.environ, "HOME": str(tmp_path)}
    environment.pop(ASSETS_VARIABLE, None)
    environment.pop(MARK, None)
    done = subprocess.run([sys.executable, "-c", family], capture_output=True, text=True, check=True, env=environment)
    (line,) = done.stderr.splitlines()
    assert "stand-in assets" in line
    assert "not comparable" in line
    assert ASSETS_VARIABLE in line
    assert done.stdout == ""


def test_a_download_that_fails_says_what_and_where_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["download_assets", str(tmp_path / "to")])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert download_assets.main() == 1
    assert f"lerobot/libero-assets could not be downloaded to {tmp_path / 'to'}" in capsys.readouterr().err
