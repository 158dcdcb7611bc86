"""A served policy: `vla-rl serve` offers it to any client of openpi's protocol, newer weights replace it.

They act between two replies, those of heads too; weights that cannot be loaded change nothing.
"""

import asyncio
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from openai import AsyncOpenAI, AuthenticationError
from processes import serving
from websockets.asyncio.client import connect
from websockets.sync.client import connect as connect_sync

from vla_rl.cli.command_line import Command, Launch
from vla_rl.cli.serve import ServeConfig, serve_policy
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.errors import CheckpointError
from vla_rl.learner.checkpoint.folders import HEADER, MANIFEST
from vla_rl.models.language.tiny import TinyConfig, write_tiny
from vla_rl.models.loading import CheckpointConfig, load_policy
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.models.prismatic.conventions import AS_STORED
from vla_rl.models.shipped import BASE_POLICY, SHIPPED_FLOW
from vla_rl.models.small_files import save_folder
from vla_rl.models.steered import SteeredPolicy, SteeringConfig
from vla_rl.models.steered.folder import load_base
from vla_rl.serving.checkpoint_watcher import CheckpointWatcher, find_policy
from vla_rl.serving.openpi_messages import decode_message, encode_message
from vla_rl.serving.policy_server import ServerConfig
from vla_rl.types import Sampling

IMAGE = np.zeros((224, 224, 3), np.uint8)
OBSERVATION = {
    "observation/image": IMAGE,
    "observation/wrist_image": IMAGE,
    "observation/state": np.zeros(8),
    "prompt": "pick up the cream cheese",
}

DOCS = Path(__file__).parents[2] / "docs"

SHAPE = MlpConfig(state_size=1, action_low=(0.0,), action_high=(10.0,), num_bins=11, hidden=(4,))

STATE = {"state": np.ones(1, np.float32)}


def test_the_shipped_policy_is_served_until_sigterm_and_no_reply_is_lost() -> None:
    with serving() as (address, process), connect_sync(address, compression=None) as client:
        metadata = decode_message(client.recv())
        assert metadata["weight_version"] == 0
        assert metadata["observation"]["state"] == "float32 [8], as observation/state or state"
        client.send(encode_message(OBSERVATION))
        client.send(encode_message(OBSERVATION))
        process.send_signal(signal.SIGTERM)
        chunks = [decode_message(client.recv())["actions"] for _ in range(2)]
        np.testing.assert_array_equal(chunks[0], chunks[1])
        assert chunks[0].shape == (8, 7)
        printed, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "│ 2       │ 0" in printed


def test_a_server_acts_by_the_means_of_tokens_if_it_is_told_so() -> None:
    with (
        serving("--by-mean", "--temperature", "0.5") as (address, _),
        connect_sync(address, compression=None) as client,
    ):
        assert decode_message(client.recv())["by_mean_at"] == 0.5
        client.send(encode_message(OBSERVATION))
        chunk = decode_message(client.recv())["actions"]
    policy: Any = load_policy(str(BASE_POLICY), CheckpointConfig(), "cpu")
    named = ("image", "wrist_image", "state", "instruction")
    batch = policy.prepare([dict(zip(named, OBSERVATION.values(), strict=True))])
    means, likeliest = (
        Sampling(greedy=True, by_mean=by_mean, temperature=0.5) for by_mean in (True, False)
    )
    with torch.inference_mode():
        expected, other = (
            policy.decode(policy.sample(batch, [each]).tokens.numpy())[0]
            for each in (means, likeliest)
        )
    np.testing.assert_allclose(chunk, expected, atol=1e-6)
    assert not np.allclose(chunk, other, atol=1e-3)


async def test_a_dry_run_shows_what_clients_send_and_serves_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = ServeConfig(checkpoint=str(BASE_POLICY), map=("arm/top=image", "side=imge"))
    assert await serve_policy(Command(Launch(dry_run=True), config)) == 0
    printed = capsys.readouterr().out
    assert "image: image uint8 [height, width, 3], as arm/top or image" in printed
    assert "side is left out: the policy reads no 'imge' (--map side=imge)" in printed
    assert "serving at" not in printed


@pytest.mark.parametrize("family", ["flow", "mlp"])
async def test_policies_of_other_families_are_described_to_clients_too(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = SHIPPED_FLOW
    if family == "mlp":
        shape = MlpConfig(state_size=4, action_low=(0.0,), action_high=(1.0,), num_bins=2)
        MlpPolicy.create(shape, seed=0).save(tmp_path / "mlp")
        checkpoint = str(tmp_path / "mlp")
    await serve_policy(Command(Launch(dry_run=True), ServeConfig(checkpoint=checkpoint)))
    printed = capsys.readouterr().out
    assert "  state: float32 [" in printed
    assert ("  image: image uint8" in printed) == (family == "flow")


async def test_a_folder_that_is_no_checkpoint_is_named() -> None:
    with pytest.raises(CheckpointError, match="no/such/folder"):
        await serve_policy(Command(Launch(), ServeConfig(checkpoint="no/such/folder")))


async def test_a_language_model_is_served_to_openais_client(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["hello, what is 1 + 2?"] * 8
    (tmp_path / "model").mkdir()
    await asyncio.to_thread(write_tiny, tmp_path / "model", TinyConfig(), texts, 0)
    config = ServeConfig(
        checkpoint=str(tmp_path / "model"), protocol="openai", server=ServerConfig(port=0), temperature=1.0
    )  # fmt: skip
    serving = asyncio.create_task(serve_policy(Command(Launch(), config)))
    printed = ""
    while "serving at " not in printed:
        await asyncio.sleep(0.01)
        assert not serving.done(), serving.exception()
        printed += capsys.readouterr().out
    address = printed.partition("serving at ")[2].partition(",")[0]
    async with AsyncOpenAI(base_url=address, api_key="local") as client:
        assert [each.id async for each in client.models.list()] == ["model"]
        asked: Any = {
            "model": "model",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 5,
        }
        replies = [await client.chat.completions.create(**asked) for _ in range(2)]
    assert replies[0].usage is not None
    assert replies[0].usage.completion_tokens == 5
    # each reply has a seed of its own
    assert replies[0].choices[0].message.content != replies[1].choices[0].message.content
    async with AsyncOpenAI(base_url=address, api_key="another") as client:
        with pytest.raises(AuthenticationError):
            await client.chat.completions.create(**asked)
    async with AsyncOpenAI(base_url=address, api_key="local") as client:
        long = asyncio.create_task(client.chat.completions.create(**{**asked, "max_tokens": 200}))
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        last = await long
    assert last.usage is not None
    assert last.usage.completion_tokens == 200
    assert await serving == 0


def block(page: str, name: str) -> str:
    """The text of the file `name` in a page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.search(rf"```python\n# {name}\.py\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


async def test_a_family_of_your_own_is_served_from_python(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {name: ModuleType(name) for name in ("my_family", "serve_mine")}
    for name, page in (("my_family", "add_a_policy_family.md"), ("serve_mine", "serving.md")):
        monkeypatch.setitem(sys.modules, name, modules[name])
        exec(compile(block(page, name), f"{page} {name}", "exec"), modules[name].__dict__)
    policy = modules["my_family"].CnnPolicy(seed=0)
    serving = asyncio.create_task(modules["serve_mine"].serve_mine(policy, port=0))
    address = ""
    while not address:
        await asyncio.sleep(0.01)
        assert not serving.done()
        address = capsys.readouterr().out.partition("serving at ")[2].strip()
    async with connect(address, compression=None) as client:
        assert decode_message(await client.recv())["policy"] == "mine"  # type: ignore[arg-type]
        await client.send(encode_message({"camera": np.zeros((32, 32, 3), np.uint8)}))
        reply = await client.recv()
        assert isinstance(reply, bytes), reply
    serving.cancel()
    await asyncio.wait((serving,))
    assert decode_message(reply)["actions"].shape == (4, 2)


def save(folder: Path, action: int, shape: MlpConfig = SHAPE) -> None:
    """Save a policy that always takes one action, in place of what is there."""
    policy = MlpPolicy.create(shape, seed=0)
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter.zero_()
        policy.network.get_parameter("head.bias")[action] = 100.0
    shutil.rmtree(folder, ignore_errors=True)
    save_folder(folder, policy.checkpoint_tensors(), policy.checkpoint_files())


def save_update(run: Path, update: int, action: int) -> None:
    folder = run / "checkpoints" / f"update-{update:06d}"
    save(folder / "policy", action)
    (folder / HEADER).write_text(f'{{"format": 1, "weight_version": {update}}}')
    (folder / MANIFEST).touch()


@asynccontextmanager
async def watching(checkpoint: Path) -> AsyncIterator[tuple[CheckpointWatcher, TorchActionEngine]]:
    found = find_policy(checkpoint)
    model = MlpPolicy.load(found.folder)
    async with (
        DeviceLane(1) as lane,
        TorchActionEngine(model, lane, EngineConfig(), found.version) as engine,
    ):
        yield CheckpointWatcher(checkpoint, MlpPolicy.load, model, engine, lane, found), engine


async def act(engine: TorchActionEngine) -> tuple[int, int]:
    chunk = await engine.act(STATE, Sampling(greedy=True))
    return round(float(chunk.actions[0, 0])), chunk.weight_version


async def test_the_newest_checkpoint_of_a_run_acts_with_its_update(tmp_path: Path) -> None:
    save_update(tmp_path, 3, action=1)
    async with watching(tmp_path) as (watcher, engine):
        assert await act(engine) == (1, 3)
        assert not await watcher.reload_newer()
        save_update(tmp_path, 7, action=2)
        assert await watcher.reload_newer()
        assert await act(engine) == (2, 7)
        assert watcher.state.error is None


async def test_a_folder_whose_files_change_is_read_again(tmp_path: Path) -> None:
    save(tmp_path / "policy", action=1)
    async with watching(tmp_path / "policy") as (watcher, engine):
        assert await act(engine) == (1, 0)
        save(tmp_path / "policy", action=2)
        assert await watcher.reload_newer()
        assert await act(engine) == (2, 1)
        assert not await watcher.reload_newer()


@pytest.mark.parametrize("damage", ["cut", "gone", "wider", "other settings", "not finite"])
async def test_a_reload_that_fails_keeps_the_old_weights_and_says_why(
    tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "policy"
    save(folder, action=1)
    async with watching(folder) as (watcher, engine):
        wider, other = {"hidden": (5,)}, {"action_high": (20.0,)}
        fields = {"wider": wider, "other settings": other}.get(damage, {})
        save(folder, action=2, shape=MlpConfig(**{**_fields(SHAPE), **fields}))
        weights = folder / "model.safetensors"
        if damage == "cut":
            weights.write_bytes(weights.read_bytes()[:-8])
        elif damage == "gone":
            weights.unlink()
        elif damage == "not finite":
            weights.write_bytes(weights.read_bytes()[:-4] + b"\xff" * 4)
        assert not await watcher.reload_newer()
        assert watcher.state.error is not None
        assert str(folder) in watcher.state.error
        assert await act(engine) == (1, 0)
        # whole again: the next look takes it
        save(folder, action=4)
        assert await watcher.reload_newer()
        assert await act(engine) == (4, 1)
        assert watcher.state.error is None


def _fields(config: MlpConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


async def test_a_reader_that_fails_in_its_own_way_and_a_checkpoint_that_is_taken_back(
    tmp_path: Path,
) -> None:
    save_update(tmp_path, 1, action=1)
    async with watching(tmp_path) as (watcher, engine):

        def fail(folder: Path) -> MlpPolicy:
            raise KeyError("no such layer")

        watcher._load = fail
        save_update(tmp_path, 2, action=2)
        assert not await watcher.reload_newer()
        assert watcher.state.error == "'no such layer'"
        assert await act(engine) == (1, 1)
        shutil.rmtree(tmp_path / "checkpoints" / "update-000002")
        assert not await watcher.reload_newer()
        assert watcher.state.error is None


async def test_no_reply_mixes_two_versions_while_checkpoints_follow_each_other(
    tmp_path: Path,
) -> None:
    save_update(tmp_path, 1, action=1)
    async with watching(tmp_path) as (watcher, engine):
        pairs: set[tuple[int, int]] = set()

        async def ask() -> None:
            while True:
                pairs.add(await act(engine))

        asking = [asyncio.create_task(ask()) for _ in range(4)]
        for update in range(2, 9):
            save_update(tmp_path, update, action=update)
            assert await watcher.reload_newer()
        await asyncio.sleep(0.05)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
    assert pairs <= {(update, update) for update in range(1, 9)}
    assert (8, 8) in pairs


async def test_a_run_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="a run without a checkpoint"):
        find_policy(tmp_path)


BASE_SHAPE = MlpConfig(
    state_size=1, action_low=(-1.0,), action_high=(1.0,), num_bins=5, hidden=(4,)
)


def save_head(folder: Path, base: Path, bias: float) -> None:
    """Save a head that corrects everything alike, in place of what is there."""
    frozen = load_base(str(base), AS_STORED, torch.device("cpu"))
    policy = SteeredPolicy.create(frozen, SteeringConfig(hidden=(4,)), seed=0)
    with torch.no_grad():
        policy.network.mean.bias.fill_(bias)
    shutil.rmtree(folder, ignore_errors=True)
    policy.save(folder)


async def test_a_newer_head_acts_and_one_over_another_base_does_not(tmp_path: Path) -> None:
    for seed in (0, 1):
        MlpPolicy.create(BASE_SHAPE, seed=seed).save(tmp_path / f"base-{seed}")
    head, greedy = tmp_path / "head", Sampling(greedy=True)
    save_head(head, tmp_path / "base-0", bias=0.0)
    found = find_policy(head)
    model = SteeredPolicy.load(head)
    async with (
        DeviceLane(1) as lane,
        TorchActionEngine(model, lane, EngineConfig(), found.version) as engine,
    ):
        watcher = CheckpointWatcher(head, SteeredPolicy.load, model, engine, lane, found)
        first = (await engine.act(STATE, greedy)).tokens
        save_head(head, tmp_path / "base-0", bias=30.0)
        assert await watcher.reload_newer()
        second = (await engine.act(STATE, greedy)).tokens
        np.testing.assert_allclose(second, first + 0.5)
        save_head(head, tmp_path / "base-1", bias=-30.0)
        assert not await watcher.reload_newer()
        assert "other settings than the policy that is served" in str(watcher.state.error)
        third = (await engine.act(STATE, greedy)).tokens
        np.testing.assert_array_equal(third, second)
