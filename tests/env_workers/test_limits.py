"""A pool that this process's limits leave no room for ends before it begins, in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import vla_rl

POOL = """
import asyncio
from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorConfig, SimulatorPool, make_vec

async def main() -> None:
    async with Runtime() as runtime, SimulatorPool(runtime, SimulatorConfig(num_envs=16)):
        pass

try:
    {what}
except ValueError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    "what",
    [
        "asyncio.run(main())",
        pytest.param("make_vec('CartPole-v1', 16)", marks=pytest.mark.proof),
    ],
    ids=["pool", "vector env"],
)
@pytest.mark.parametrize(
    ("limit", "told"), [("-n 128", "`ulimit -n` is 128"), ("-v 4000000", "`ulimit -v` is 4000000")]
)
def test_sixteen_simulators_under_a_low_limit_end_in_one_line(
    what: str, limit: str, told: str
) -> None:
    command = [
        "sh",
        "-c",
        f'ulimit {limit} && exec "$0" -c "$1"',
        sys.executable,
        POOL.format(what=what),
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(vla_rl.__file__).parent.parent)}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"ConfigError {told}")
    assert "16 child processes need about" in ended.stdout
    assert ended.stdout.endswith("or take fewer processes (num_envs, or more envs_per_process).\n")
