"""`vla-rl` runs what it lists, serves as a host, exports files that run where no vla_rl is."""

import ast
import os
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from vla_rl.actors import read_keys
from vla_rl.cli import export, host, main as program
from vla_rl.cli.host import own_address
from vla_rl.cli.main import main, recipes
from vla_rl.cluster.host_file import read_host_file

PROGRAM = [sys.executable, "-m", "vla_rl.cli.main"]


def test_every_recipe_is_listed_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert "  srpo_libero            SRPO on LIBERO\n" in listed
    assert all(f"  {name} " in listed and sentence for name, sentence in recipes().items())
    assert "libero_training" not in listed  # no program


def test_a_recipe_is_run_by_its_name_with_its_own_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)  # which the program changes
    with pytest.raises(SystemExit) as ended:
        main(["train_toy", "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: vla-rl train_toy [-h]")


def test_a_module_beside_the_user_is_found_as_python_m_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_scorers.py").write_text("def score(reply, row): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    # as an installed program has it
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    monkeypatch.setattr(
        "vla_rl.recipes.train_toy.cli", lambda: int(find_spec("my_scorers") is not None)
    )
    assert main(["train_toy"]) == 1


def test_the_exit_status_is_that_of_the_recipe() -> None:
    done = subprocess.run(
        [*PROGRAM, "train_toy", "--dry-run", "--group-size", "0"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "group_size" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("env", [["--env", "toy"], ["--env=toy"]])
def test_an_environment_chooses_among_the_recipes_of_an_algorithm(
    env: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(
        "vla_rl.recipes.train_toy.cli", lambda: len(seen.append([*program.sys.argv]) or seen)
    )
    assert main(["train", *env, "--dry-run"]) == 1
    assert seen == [["vla-rl train_toy", "--dry-run"]]


def test_an_environment_without_a_recipe_gets_the_nearest_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["srpo", "--env", "metawrld"]) == 2
    assert "no recipe 'srpo_metawrld', did you mean 'srpo_metaworld'?" in capsys.readouterr().err


def test_a_name_that_is_no_recipe_gets_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["srpo_libro"]) == 2
    assert "no recipe 'srpo_libro', did you mean 'srpo_libero'?" in capsys.readouterr().err


def test_the_program_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"vla-rl {version('vla_rl')}\n"


def test_the_printed_lines_are_a_list_of_hosts(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    command = [sys.executable, "-m", "vla_rl.cli.host", "--bind", "tcp://127.0.0.1:0"]
    with subprocess.Popen(
        [*command, "--keys", str(keys)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        printed = ""
        while "serving actors on" not in printed:
            line = server.stdout.readline()
            assert line, printed
            printed += line
        server.terminate()
    assert server.returncode == 0
    assert {path.name for path in keys.iterdir()} == {
        "client.key", "client.pub", "server.key", "server.pub"
    }  # fmt: skip
    tables = re.search(r"\[\[host\]\].*?(?=serving)", printed, re.DOTALL)
    assert tables is not None
    listed = tmp_path / "hosts.toml"
    listed.write_text(f'client_key = "{keys}/client.key"\n{tables[0]}')
    (known,) = read_host_file(listed)
    assert known.placement.server_public_key == read_keys(keys / "server.key").public


def test_the_key_to_allow_is_shown_and_stays_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for _ in range(2):
        assert host.main(["--show-key", "--keys", str(tmp_path)]) == 0
        shown.append(capsys.readouterr().out.strip())
    assert shown == [read_keys(tmp_path / "client.key").public] * 2


@pytest.mark.parametrize("key", ["short", "nowhere.pub"])
def test_a_key_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    assert host.main(["--keys", str(tmp_path), "--allow", key]) == 2
    assert key in capsys.readouterr().err


def test_a_machine_knows_an_address_of_its_own() -> None:
    assert own_address()


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
