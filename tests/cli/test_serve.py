"""`vla-rl serve` serves a checkpoint to any client of openpi's protocol."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import AsyncOpenAI, AuthenticationError
from served_policy import serving
from websockets.sync.client import connect

from vla_rl.cli.command_line import Command, Launch
from vla_rl.cli.serve import ServeConfig, serve_policy
from vla_rl.errors import CheckpointError
from vla_rl.models.language.tiny import TinyConfig, write_tiny
from vla_rl.models.loading import CheckpointConfig, load_policy
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.models.shipped import BASE_POLICY, SHIPPED_FLOW
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


def test_the_shipped_policy_is_served_until_sigterm_and_no_reply_is_lost() -> None:
    with serving() as (address, process), connect(address, compression=None) as client:
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
        connect(address, compression=None) as client,
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
