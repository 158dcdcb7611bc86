"""Runs one environment in every vector mode, in a process that begins without OpenGL, and prints a
line for each.

    python vector_modes.py <env id> <keywords as JSON> <contexts of async, such as fork,spawn> <number>

A line has the mode and a digest of what that number of environments see at their start and after
one step. The last line says whether this process has imported torch.
"""

import hashlib
import json
import sys
from typing import Any

import gymnasium
import numpy as np

import vla_rl.envs  # noqa: F401 - registers the environments


def digest_of(envs: Any) -> str:
    """What they see, as one number."""
    seen = hashlib.sha256()
    start, _ = envs.reset(seed=[3, 4][: envs.num_envs])
    add_to(seen, start)
    action = np.full((envs.num_envs, *envs.single_action_space.shape), 0.1, np.float32)
    add_to(seen, envs.step(action)[0])
    envs.close()
    return seen.hexdigest()


def add_to(seen: Any, observation: Any) -> None:
    """The arrays and words of an observation."""
    for key, value in sorted(observation.items()):
        is_array = isinstance(value, np.ndarray) and value.dtype.kind not in "OU"
        content = np.ascontiguousarray(value).tobytes() if is_array else repr([*map(str, value)])
        seen.update(key.encode() + (content if isinstance(content, bytes) else content.encode()))


def main(env_id: str, kwargs: dict[str, Any], contexts: list[str], num_envs: int) -> None:
    """The modes in turn; the one that draws in this process comes last, as no other could be forked
    after it.
    """
    for context in contexts:
        envs = gymnasium.make_vec(
            env_id,
            num_envs,
            vectorization_mode="async",
            vector_kwargs={"context": context},
            **kwargs,
        )
        print(context, digest_of(envs), flush=True)
    for name, mode in (("ours", "vector_entry_point"), ("sync", "sync")):
        envs = gymnasium.make_vec(env_id, num_envs, vectorization_mode=mode, **kwargs)
        print(name, digest_of(envs), flush=True)
    print("torch imported:", "torch" in sys.modules)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3].split(","), int(sys.argv[4]))
