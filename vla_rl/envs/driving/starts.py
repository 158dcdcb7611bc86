"""Which scene an episode starts in."""

from typing import Any

import numpy as np

from vla_rl.envs.driving.world import NUM_SCENES


def scene_number(options: dict[str, Any] | None, rng: np.random.Generator) -> int:
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
        return int(rng.integers(NUM_SCENES))
    if not 0 <= named < NUM_SCENES:
        raise ValueError(f"init_state_id is {named}, expected 0 to {NUM_SCENES - 1}.")
    return int(named)
