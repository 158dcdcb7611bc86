"""`vla-rl serve` serves a checkpoint to any client of openpi's protocol."""

import signal

import numpy as np
import pytest
from served_policy import serving
from websockets.sync.client import connect

from vla_rl.cli.command_line import Command, Launch
from vla_rl.cli.serve import ServeConfig, serve_policy
from vla_rl.errors import CheckpointError
from vla_rl.models.loading import BASE_POLICY
from vla_rl.serving.openpi_messages import decode_message, encode_message

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


async def test_a_dry_run_shows_what_clients_send_and_serves_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = ServeConfig(checkpoint=str(BASE_POLICY), map=("arm/top=image",))
    assert await serve_policy(Command(Launch(dry_run=True), config)) == 0
    printed = capsys.readouterr().out
    assert "image: image uint8 [height, width, 3], as arm/top or image" in printed
    assert "serving at" not in printed


async def test_a_folder_that_is_no_checkpoint_is_named() -> None:
    with pytest.raises(CheckpointError, match="no/such/folder"):
        await serve_policy(Command(Launch(), ServeConfig(checkpoint="no/such/folder")))
