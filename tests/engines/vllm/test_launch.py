"""What an engine is launched with: a private folder, GPUs of its own, the first lines of its process."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_policies import TEXTS, completing_policy, oft_policy

from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.engines.vllm import VllmChatEngine, VllmConfig
from vla_rl.engines.vllm.launch import (
    STARTUP_PATH,
    assign_gpus,
    engine_arguments,
    engine_folder,
    require_shareable,
    spread_engines,
)
from vla_rl.engines.vllm.preload.sitecustomize import PARENT
from vla_rl.engines.vllm.process import EngineThread
from vla_rl.errors import ConfigError
from vla_rl.models.vllm import serve
from vla_rl.types import Message, Sampling

OWNER = """
import sys
from vla_rl.engines.vllm.launch import engine_folder
with engine_folder() as folder:
    (folder / "config.json").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Not pytest's own, whose path is long."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_a_folder_outlives_its_owner_only_until_the_next_one(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().decode().strip())
        with engine_folder() as ours:
            assert ours.stat().st_mode & 0o777 == 0o700
            assert set(temporary.iterdir()) == {ours, theirs}
        owner.kill()
        owner.wait()
        assert theirs.exists()
    with engine_folder():
        assert not theirs.exists()
    assert list(temporary.iterdir()) == []


def test_a_path_that_is_too_long_for_sockets_is_refused(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = temporary / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with (
        pytest.raises(ConfigError, match="expected at most 70; set TMPDIR to a shorter one"),
        engine_folder(),
    ):
        pass
    assert list(long.iterdir()) == []


def sized(size: int, num_engines: int = 1) -> EngineConfig:
    # workers wait for each other busily, which takes minutes to start on cores that are busy anyway
    vllm = VllmConfig(tensor_parallel_size=size, num_engines=num_engines, startup_s=900.0)
    return EngineConfig(kind="vllm", vllm=vllm)


def test_a_host_has_as_many_engines_as_its_gpus_hold() -> None:
    gpus = ["0", "1", "2", "3", "4"]
    assert assign_gpus(spread_engines(sized(1), gpus).vllm, gpus) == [(gpu,) for gpu in gpus]
    assert assign_gpus(spread_engines(sized(2), gpus).vllm, gpus) == [("0", "1"), ("2", "3")]
    # on a CPU, as many as were asked for
    assert assign_gpus(spread_engines(sized(1, num_engines=2), ()).vllm, ()) == [(), ()]


def test_an_engine_that_needs_more_gpus_than_there_are_is_refused_with_the_inequality() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4 > 2 GPUs of this host"):
        spread_engines(sized(4), ["0", "1"])


def test_only_layers_that_can_be_shared_are_shared() -> None:
    speaker = serve(completing_policy()).layout  # of two heads
    require_shareable(speaker, 2)
    with pytest.raises(ConfigError, match="does not divide the policy's num_attention_heads = 2"):
        require_shareable(speaker, 3)
    with pytest.raises(ConfigError, match="expected 1 for a policy over actions"):
        require_shareable(serve(oft_policy()).layout, 2)
    arguments = engine_arguments(
        Path("folder"), speaker, sized(2).vllm, build="cuda", dtype="bfloat16"
    )
    shared = arguments["tensor_parallel_size"], arguments["distributed_executor_backend"]
    assert shared == (2, "mp")


@pytest.mark.proof
@pytest.mark.needs_vllm
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")
async def test_two_workers_that_share_layers_reply_as_one_does_also_after_an_update() -> None:
    prompt, sampling = [Message(role="user", content=TEXTS[0])], Sampling(greedy=True)
    found: list[list[torch.Tensor]] = []
    for size in (1, 2):
        policy = completing_policy()
        replies = []
        async with (
            DeviceLane(1) as lane,
            VllmChatEngine(serve(policy), lane, sized(size)) as engine,
        ):
            for version in (1, 2):
                reply = await engine.generate(prompt, sampling=sampling, max_tokens=6)
                replies.append(torch.tensor(reply.log_probs))
                torch.manual_seed(0)
                with torch.no_grad():
                    for parameter in policy.network.parameters():
                        parameter.add_(0.05 * torch.randn_like(parameter))
                await lane.run(engine.apply_weights, policy.network, version)
        found.append(replies)
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=0.0, atol=1e-5)
    assert not torch.allclose(found[0][0], found[0][1])


LOOK_AROUND = """
import json, os, signal, tempfile
blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
print(json.dumps([os.getpid(), int(os.environ["VLA_RL_ENGINE_PARENT"]), tempfile.gettempdir(), blocked]), flush=True)
input()
"""
AS_ENGINE = "--multiprocessing-fork"  # an argument by which multiprocessing starts a process


def start(folder: Path, *arguments: str, parent: int | None = None) -> "subprocess.Popen[str]":
    own = {
        "PYTHONPATH": str(STARTUP_PATH),
        PARENT: str(parent or os.getpid()),
        "VLLM_RPC_BASE_PATH": str(folder),
    }
    return subprocess.Popen(
        [sys.executable, "-c", LOOK_AROUND, *arguments],
        env={**os.environ, **own},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_an_engine_process_keeps_its_files_in_the_folder_and_leaves_signals_of_the_terminal_to_its_parent(
    tmp_path: Path,
) -> None:
    with start(tmp_path, AS_ENGINE) as process:
        out, _ = process.communicate("\n")
    # processes that it starts have it as their parent
    assert json.loads(out) == [
        process.pid,
        process.pid,
        str(tmp_path),
        [signal.SIGHUP, signal.SIGINT],
    ]


def test_a_process_that_vllm_did_not_start_is_left_as_it_is(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        out, _ = process.communicate("\n")
    assert json.loads(out) == [process.pid, os.getpid(), tempfile.gettempdir(), []]


def test_an_engine_process_whose_parent_died_before_its_first_line_runs_no_other(
    tmp_path: Path,
) -> None:
    with start(tmp_path, AS_ENGINE, parent=os.getppid()) as process:  # not the one that it has
        assert process.communicate("\n") == ("", None)
    assert process.returncode == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("is_stopped", [False, True])
async def test_an_engine_process_is_killed_with_the_thread_that_started_it(
    tmp_path: Path, is_stopped: bool
) -> None:
    thread = EngineThread("engine")
    with await thread.run_work(lambda: start(tmp_path, AS_ENGINE)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert thread.processes() == [process.pid]
        if is_stopped:
            process.send_signal(signal.SIGSTOP)
        await thread.stop_thread()
        assert process.wait() == -signal.SIGKILL
