"""openpi-client, unchanged, is served by `vla-rl serve`."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from served_policy import serving

ARM = Path(__file__).parent / "support" / "openpi_arm.py"


@pytest.mark.parametrize("has_token", [False, True])
def test_openpis_client_gets_chunks_errors_and_metadata(tmp_path: Path, has_token: bool) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    options = ["--server.token-file", str(token)] if has_token else []
    with serving(*options) as (address, _):
        command = [os.environ["VLA_RL_CLIENT_PYTHON"], str(ARM), address]
        command += [token.read_text()] if has_token else []
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        printed = subprocess.check_output(command, text=True, env=clean, timeout=120)
    seen = json.loads(printed.splitlines()[-1])
    assert seen["shape"] == [8, 7]
    assert seen["writable_dtype"] == "<f4"
    assert seen["alike"]
    assert seen["timing"] > 0
    assert seen["metadata"]["weight_version"] == 0
    assert "'observation/state' has 7 numbers, expected 8" in seen["error"]
    assert "'speed' is unknown" in seen["error"]
