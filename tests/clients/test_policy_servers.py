"""Policies beside openpi or vla-eval, unchanged: their servers are asked by `eval_libero`'s client, openpi-client is
served by `vla-rl serve`."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from other_programs import expected
from processes import serving

from vla_rl.serving.remote_config import RemotePolicyConfig
from vla_rl.serving.remote_policy import RemotePolicyServer
from vla_rl.types import Sampling

CLIENT = os.environ.get("VLA_RL_CLIENT_NAME")
PROGRAMS = Path(__file__).parent / "support" / "other_programs.py"
RANDOM = np.random.default_rng(0)
OBSERVATION = {
    "image": RANDOM.integers(0, 256, (256, 256, 3), dtype=np.uint8),
    "wrist_image": RANDOM.integers(0, 256, (256, 256, 3), dtype=np.uint8),
    "state": np.linspace(-1, 1, 8, dtype=np.float32),
    "instruction": "open the middle drawer of the cabinet",
}
ROWS = expected(*OBSERVATION.values())


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """Yield the address of a server in the other project's interpreter."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [os.environ["VLA_RL_CLIENT_PYTHON"], str(PROGRAMS), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean)
    try:
        assert process.stdout is not None
        yield f"ws://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate()


async def ask(address: str, config: RemotePolicyConfig) -> np.ndarray:
    server = RemotePolicyServer(address, config, action_size=7)
    return (await server.act(OBSERVATION, Sampling())).actions


@pytest.mark.skipif(CLIENT != "openpi-server", reason="of openpi's server")
@pytest.mark.parametrize("replan", [None, 2])
async def test_openpis_own_server_answers_with_its_chunk(replan: int | None) -> None:
    with served("openpi") as address:
        actions = await ask(address, RemotePolicyConfig(replan=replan))
    np.testing.assert_allclose(actions, ROWS[:replan], atol=1e-6)


@pytest.mark.skipif(CLIENT != "vla-eval", reason="of vla-eval")
@pytest.mark.parametrize(("chunk_size", "rows"), [("0", 3), ("2", 1)])
async def test_a_predict_server_of_vla_eval_answers_with_a_chunk_or_its_next_action(
    chunk_size: str, rows: int
) -> None:
    with served("vla-eval", chunk_size) as address:
        actions = await ask(address, RemotePolicyConfig(protocol="vla-eval"))
    np.testing.assert_allclose(actions, ROWS[:rows], atol=1e-6)


@pytest.mark.skipif(CLIENT != "openpi", reason="of openpi's client")
@pytest.mark.parametrize("has_token", [False, True])
def test_openpis_client_gets_chunks_errors_and_metadata(tmp_path: Path, has_token: bool) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    options = ["--server.token-file", str(token)] if has_token else []
    with serving(*options) as (address, _):
        command = [os.environ["VLA_RL_CLIENT_PYTHON"], str(PROGRAMS), "openpi-arm", address]
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
