"""Running an action chunk: H control steps chosen at once and executed open loop, one row each.

Frames between the first and the last row are seen by nobody. An environment whose unwrapped class has
`render_every_step: bool` may leave them out while it is False; it renders anyway where the episode ends.
"""

from typing import Any

import gymnasium
import numpy as np

from vla_rl.types import Info


def run_chunk(
    env: gymnasium.Env[Any, Any], actions: np.ndarray, *, render_every_row: bool = False
) -> tuple[Any, np.ndarray, bool, bool, Info]:
    """Run the rows of `actions` until they are done or the episode ends.

    Args:
        env: reset, and not yet at its end.
        actions: [H, ...], H >= 1, each row an action of `env`.
        render_every_row: render intermediate rows too, for an environment that could leave them out.

    Returns: the observation after the last executed row; float32 [N], one reward for each executed row; terminated;
        truncated; the last row's info, with `num_executed` = N.
    """
    if len(actions) < 1:
        raise ValueError(f"action chunk is {actions.shape}, expected at least one row.")
    simulator: Any = env.unwrapped
    can_skip = not render_every_row and hasattr(simulator, "render_every_step") and not _has_time_limit_wrapper(env)
    rewards: list[float] = []
    last = len(actions) - 1
    try:
        for number, row in enumerate(actions):
            if can_skip:
                simulator.render_every_step = number == last
            observation, reward, terminated, truncated, info = env.step(row)
            rewards.append(float(reward))
            if terminated or truncated:
                break
    finally:
        if can_skip:
            simulator.render_every_step = True
    executed = {**info, "num_executed": len(rewards)}
    return observation, np.array(rewards, np.float32), bool(terminated), bool(truncated), executed


def _has_time_limit_wrapper(env: gymnasium.Env[Any, Any]) -> bool:
    """A wrapper of gymnasium's ends episodes behind the environment's back: no row is surely in between."""
    return env.spec is not None and env.spec.max_episode_steps is not None
