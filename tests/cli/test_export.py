"""`vla-rl export` writes files that run where no vla_rl is."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vla_rl.cli import export
from vla_rl.cli.main import main

FILES = {
    "carla": [
        "vla_rl_agent.py",
        "vla_rl_first_junctions.py",
        "vla_rl_route_server.py",
        "vla_rl_wire.py",
    ],
    "navsim": ["export_scenes.py"],
}


@pytest.mark.parametrize("program", FILES)
def test_the_files_of_a_program_are_written_and_those_of_an_older_export_replaced(
    program: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)  # which the program changes
    folder = tmp_path / "new" / "folder"
    for _ in range(2):
        assert main(["export", program, str(folder)]) == 0
        written = capsys.readouterr().out.splitlines()
        assert written == [str(folder / name) for name in FILES[program]]
        assert sorted(path.name for path in folder.iterdir()) == FILES[program]
        for source in export.list_exported(program):
            assert (folder / source.name).read_bytes() == source.read_bytes()
        (folder / FILES[program][0]).write_text("of an older version")


@pytest.mark.parametrize("program", FILES)
def test_nothing_in_an_export_imports_vla_rl(program: str) -> None:
    for source in export.list_exported(program):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] != "vla_rl", source
            elif isinstance(node, ast.Import):
                assert all(each.name.split(".")[0] != "vla_rl" for each in node.names), source


def test_an_exported_program_starts_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    assert main(["export", "carla", str(tmp_path)]) == 0
    done = subprocess.run(
        [sys.executable, "vla_rl_route_server.py", "--help"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: vla_rl_route_server.py")


def test_another_program_and_a_file_in_place_of_the_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    with pytest.raises(SystemExit) as ended:
        main(["export", "waymo", str(tmp_path)])
    assert ended.value.code == 2
    assert "invalid choice: 'waymo'" in capsys.readouterr().err
    taken = tmp_path / "taken"
    taken.write_text("")
    assert main(["export", "carla", str(taken)]) == 1
    assert "error: " in capsys.readouterr().err
