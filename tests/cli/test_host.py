"""`vla-rl host`: keys are made on the spot, and what it prints is what the list of hosts needs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vla_rl.actors import read_keys
from vla_rl.cli.host import main
from vla_rl.cli.own_address import own_address
from vla_rl.cluster.host_file import read_host_file


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
        assert main(["--show-key", "--keys", str(tmp_path)]) == 0
        shown.append(capsys.readouterr().out.strip())
    assert shown == [read_keys(tmp_path / "client.key").public] * 2


@pytest.mark.parametrize("key", ["short", "nowhere.pub"])
def test_a_key_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    assert main(["--keys", str(tmp_path), "--allow", key]) == 2
    assert key in capsys.readouterr().err


def test_a_machine_knows_an_address_of_its_own() -> None:
    assert own_address()
