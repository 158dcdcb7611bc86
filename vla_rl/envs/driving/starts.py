"""Which scene an episode starts in."""

from typing import Any

import numpy as np

from vla_rl.envs.driving.world import NUM_SCENES


def scene_number(
    options: dict[str, Any] | None, rng: np.random.Generator, num_scenes: int = NUM_SCENES
) -> int:
    """Return the scene that the options name, or draw one.

    Raises: ValueError for another option or number.
    """
    unknown = set(options or {}) - {"init_state_id"}
    if unknown:
        raise ValueError(
            f"reset options {sorted(unknown)} are unknown, expected only 'init_state_id'."
        )
    named = (options or {}).get("init_state_id")
    if named is None:
        return int(rng.integers(num_scenes))
    if not 0 <= named < num_scenes:
        raise ValueError(f"init_state_id is {named}, expected 0 to {num_scenes - 1}.")
    return int(named)
