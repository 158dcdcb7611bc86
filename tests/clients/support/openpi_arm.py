"""A robot's program with openpi's own client, unchanged; prints what it saw as one line of JSON.

Runs in the client's interpreter: `python openpi_arm.py ADDRESS [TOKEN]`.
"""

import json
import sys

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy

address, *token = sys.argv[1:]
policy = WebsocketClientPolicy(address, api_key=token[0] if token else None)
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
