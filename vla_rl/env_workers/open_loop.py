"""Run an action chunk: H control steps chosen at once and executed open loop, one row each.

Images between the first and the last row are unused, unless a wrapper reads them. An environment
whose unwrapped class has `render_every_step: bool` may skip them while it is False; it renders
anyway when the episode ends. Code that needs some of them (a video, a reward on whole trajectories)
asks for frames, which are what `render` returns. If that is also an image of the observation, the
unwrapped class names its key in `render_key: str`.
"""

from typing import Any

import gymnasium
import numpy as np

from vla_rl.env_workers.spaces import spell
from vla_rl.env_workers.wrapping import shows_every_step
from vla_rl.errors import EnvError
from vla_rl.types import Info


def run_chunk(
    env: gymnasium.Env[Any, Any],
    actions: np.ndarray,
    *,
    frames_every: int | None = None,
    num_steps_before: int = 0,
) -> tuple[Any, np.ndarray, bool, bool, Info]:
    """Run the rows of `actions` until they are done or the episode ends.

    Args:
        env: reset, and not yet at its end.
        actions: [H, ...], H >= 1, each row an action of `env`.
        frames_every: keep what `render` returns after each k-th control step of the episode; None
            for no frames.
        num_steps_before: control steps of this episode before the chunk, from which `frames_every`
            counts.

    Returns: the observation after the last executed row; float32 [N], one reward for each executed
        row; terminated; truncated; the last row's info, with `num_executed` = N and, if frames were
        due, `frames`: uint8 [n, ...].

    Raises: `ValueError` for a chunk without rows, or if frames are due and the environment renders
        none; `EnvError` if `step` returns something else than gymnasium's five values.
    """
    if frames_every is not None and frames_every < 1:
        raise ValueError(
            f"frames_every is {frames_every}, expected >= 1 control steps, or None for no frames."
        )
    if len(actions) < 1:
        raise ValueError(f"action chunk is {actions.shape}, expected at least one row.")
    simulator: Any = env.unwrapped
    can_skip = hasattr(simulator, "render_every_step") and not shows_every_step(env)
    rewards: list[float] = []
    frames: list[np.ndarray] = []
    last = len(actions) - 1
    try:
        for number, row in enumerate(actions):
            if can_skip:
                simulator.render_every_step = number == last
            observation, reward, terminated, truncated, info = _parts_of(env, env.step(row))
            rewards.append(reward)
            if frames_every is not None and (num_steps_before + len(rewards)) % frames_every == 0:
                frames.append(_frame(env))
            if terminated or truncated:
                break
    finally:
        if can_skip:
            simulator.render_every_step = True
    executed = {**info, "num_executed": len(rewards)}
    if frames:
        executed["frames"] = np.stack(frames)
    return observation, np.array(rewards, np.float32), bool(terminated), bool(truncated), executed


def _parts_of(env: gymnasium.Env[Any, Any], answer: Any) -> tuple[Any, float, Any, Any, Any]:
    """Return the values of `step`.

    Raises: EnvError if it is not a tuple of five, or its reward is not a number.
    """
    if not isinstance(answer, tuple) or len(answer) != 5:
        what = f"a tuple of {len(answer)}" if isinstance(answer, tuple) else spell(answer)
        expected = "a tuple (observation, reward, terminated, truncated, info)"
        raise EnvError(f"{_name_of(env)}: step returned {what}, expected {expected}")
    observation, reward, terminated, truncated, info = answer
    if type(reward) is not float:
        try:
            reward = float(reward)
        except (TypeError, ValueError):
            raise EnvError(
                f"{_name_of(env)}: step returned the reward {spell(reward)}, expected a number"
            ) from None
    return observation, reward, terminated, truncated, info


def _name_of(env: gymnasium.Env[Any, Any]) -> str:
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__


def _frame(env: gymnasium.Env[Any, Any]) -> np.ndarray:
    picture: Any = env.render()
    if not isinstance(picture, np.ndarray):
        raise ValueError(
            f"frames are wanted, but render returned {type(picture).__name__}; make the "
            "environment with "
            'render_mode="rgb_array".'
        )
    return picture
