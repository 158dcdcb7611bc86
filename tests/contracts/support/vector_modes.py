"""Runs one environment in every vector mode, in a process that begins without OpenGL, and prints a
line for each.

    python vector_modes.py <env id> <keywords as JSON> <contexts of async, such as fork,spawn>

A line has the mode and a digest of what two environments see at their start and after one step. The
last line says whether this process has imported torch.
"""

import hashlib
import json
import sys
from typing import Any

import gymnasium
import numpy as np

import vla_rl.envs  # noqa: F401 - registers the environments
from vla_rl.simulation import make_vec
from vla_rl.types import EnvSpec

NUM_ENVS = 2


def digest_of(envs: Any) -> str:
    """What they see, as one number."""
    seen = hashlib.sha256()
    start, _ = envs.reset(seed=[3, 4])
    start = {key: start[key].copy() for key in ("image", "state")}
    action = np.full((NUM_ENVS, *envs.single_action_space.shape), 0.1, np.float32)
    for observation in (start, envs.step(action)[0]):
        for key in ("image", "state"):
            seen.update(np.ascontiguousarray(observation[key]).tobytes())
    envs.close()
    return seen.hexdigest()


def main(env_id: str, kwargs: dict[str, Any], contexts: list[str]) -> None:
    """The modes in turn; the one that draws in this process comes last, as no other could be forked
    after it.
    """
    for context in contexts:
        envs = gymnasium.make_vec(
            env_id,
            NUM_ENVS,
            vectorization_mode="async",
            vector_kwargs={"context": context},
            **kwargs,
        )
        print(context, digest_of(envs), flush=True)
    print("ours", digest_of(make_vec(EnvSpec(id=env_id, kwargs=kwargs), NUM_ENVS)), flush=True)
    print(
        "sync",
        digest_of(gymnasium.make_vec(env_id, NUM_ENVS, vectorization_mode="sync", **kwargs)),
        flush=True,
    )
    print("torch imported:", "torch" in sys.modules)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3].split(","))
