"""A policy behind openpi's own server, unchanged; prints its port.

Runs in the server's interpreter: `python openpi_policy_server.py`.
"""

import asyncio
import socket

from openpi.serving.websocket_policy_server import WebsocketPolicyServer
from openpi_client.base_policy import BasePolicy
from shown_actions import show


class Shown(BasePolicy):
    def infer(self, obs: dict) -> dict:  # type: ignore[type-arg]
        return {
            "actions": show(
                obs["observation/image"], obs["observation/wrist_image"], obs["observation/state"], obs["prompt"]
            )
        }  # fmt: skip

    def reset(self) -> None:
        pass


with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
print(port, flush=True)
asyncio.run(WebsocketPolicyServer(Shown(), "127.0.0.1", port, {"policy": "shown"}).run())
