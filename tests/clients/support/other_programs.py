"""Programs with clients or servers of other projects, unchanged, in an interpreter that has those.

    python other_programs.py openpi-arm ADDRESS [TOKEN]   a robot's program; prints what it saw as one line of JSON
    python other_programs.py openpi                       a policy behind openpi's own server; prints its port
    python other_programs.py vla-eval CHUNK_SIZE          the same of vla-eval; 0 for whole chunks

Actions of the servers show what they were given.
"""

import asyncio
import json
import socket
import sys
from typing import Any

import numpy as np


def show(image: Any, wrist: Any, state: Any, prompt: str) -> np.ndarray:
    """Three rows of seven: row 0 the observation in numbers of at most 1, then constants."""
    seen = [
        image.mean() / 255,
        wrist.mean() / 255,
        state[0],
        state[7],
        len(prompt) / 100,
        image.shape[0] / 1000,
        1,
    ]
    return np.array([seen, [0.5] * 7, [-0.5] * 7])


def expected(image: Any, wrist: Any, state: Any, prompt: str) -> np.ndarray:
    """What arrives of it."""
    return show(image, wrist, state, prompt).astype(np.float32)


def run_openpi_arm(address: str, token: str | None = None) -> None:
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    policy = WebsocketClientPolicy(address, api_key=token)
    image = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    observation = {
        "observation/image": image,
        "observation/wrist_image": image[::-1],
        "observation/state": np.zeros(8),
        "prompt": "pick up the cream cheese",
    }
    replies = [policy.infer(observation) for _ in range(3)]
    policy.reset()
    try:
        policy.infer({**observation, "observation/state": np.zeros(7), "speed": np.float32(1.0)})
    except RuntimeError as refused:
        error = str(refused)
    last = policy.infer(observation)
    seen = {
        "metadata": policy.get_server_metadata(),
        "shape": last["actions"].shape,
        "writable_dtype": last["actions"].dtype.str,
        "alike": all(np.array_equal(each["actions"], last["actions"]) for each in replies),
        "timing": last["server_timing"]["infer_ms"],
        "error": error,
    }
    print(json.dumps(seen))


def serve_openpi() -> None:
    from openpi.serving.websocket_policy_server import WebsocketPolicyServer
    from openpi_client.base_policy import BasePolicy

    class Shown(BasePolicy):
        def infer(self, obs: dict) -> dict:  # type: ignore[type-arg]
            return {
                "actions": show(
                    obs["observation/image"],
                    obs["observation/wrist_image"],
                    obs["observation/state"],
                    obs["prompt"],
                )
            }

        def reset(self) -> None:
            pass

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    print(port, flush=True)
    asyncio.run(WebsocketPolicyServer(Shown(), "127.0.0.1", port, {"policy": "shown"}).run())


def serve_vla_eval(chunk_size: int | None) -> None:
    import anyio
    from vla_eval.model_servers.predict import PredictModelServer
    from vla_eval.model_servers.serve import serve_async

    class Shown(PredictModelServer):
        def predict(self, obs, ctx):  # type: ignore[no-untyped-def]
            images = obs["images"]
            return {
                "actions": show(
                    images["agentview"], images["wrist"], obs["states"], obs["task_description"]
                )
            }

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            server = Shown(chunk_size=chunk_size)
            print(await tasks.start(serve_async, server, "127.0.0.1", 0), flush=True)

    anyio.run(main)


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    if name == "openpi-arm":
        run_openpi_arm(*arguments)
    elif name == "openpi":
        serve_openpi()
    else:
        serve_vla_eval(int(arguments[0]) or None)
