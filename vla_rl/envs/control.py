"""`ControlEnv`: any gymnasium environment whose observation is a vector.

CartPole-v1 and Pendulum-v1 are two.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from vla_rl.types import Info, Observation


class ControlEnv(gymnasium.Env[Observation, np.ndarray]):
    """A low-dimensional gymnasium environment with a dict observation and a `Box` action.

    So it can be chunked.

    Observation:
        state: float32 [D], the inner observation flattened; a `Discrete` one is one-hot.
    Action: float32 [A] in the inner environment's bounds. For a `Discrete` inner space of n actions
        it is float32 [1] in [0, n - 1], rounded to the nearest.
    Reward: the inner environment's, times `reward_scale`.
    Ends: `terminated` by the inner environment, `truncated` by its time limit, or after
        `step_limit` control steps.
    Info: the inner environment's; `return`, the unscaled return so far; and, with a
        `success_return`, `is_success`: True on the last step of an episode whose unscaled return
        reached it.
    Randomness: `reset(seed=...)`.

    Args:
        env_id: gymnasium id of the inner environment.
        step_limit: control steps after which an episode is truncated; None for the inner
            environment's own limit.
        reward_scale: factor on the rewards, so that returns are of order one.
        success_return: unscaled return that counts as success at the end of the episode. None: the
            inner environment's own `is_success`, if it has one. A success at a time limit is
            truncated, because the inner environment would have continued.
    """

    def __init__(
        self,
        env_id: str,
        step_limit: int | None = None,
        reward_scale: float = 1.0,
        success_return: float | None = None,
    ) -> None:
        if step_limit is not None and step_limit < 1:
            raise ValueError(
                f"step_limit is {step_limit}, expected at least 1 control step, or None."
            )
        # without a limit of its own, no wrapper of gymnasium ends the episode without our knowledge
        self._env: gymnasium.Env[Any, Any] = gymnasium.make(env_id, max_episode_steps=step_limit)
        self._seen = self._env.observation_space
        self.observation_space = spaces.Dict(
            {"state": spaces.Box(-np.inf, np.inf, (spaces.flatdim(self._seen),), np.float32)}
        )
        self._chosen = self._env.action_space
        self.action_space = _action_box(env_id, self._chosen)
        self._reward_scale, self._success_return = reward_scale, success_return
        self._return = 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start an episode."""
        super().reset(seed=seed)
        self._return = 0.0
        seen, info = self._env.reset(seed=seed)
        # At the reset too: an episode whose infos lack the key counts as one without a success to
        # report, and its table shows `-` instead of 0 %.
        return self._observe(seen), info if self._success_return is None else {
            **info,
            "is_success": False,
        }

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Run one control step."""
        inner = action
        if isinstance(self._chosen, spaces.Discrete):
            inner = self._chosen.start + np.int64(
                np.rint(action[0])
            )  # a scalar: some environments look it up in a dict
        seen, reward, terminated, truncated, info = self._env.step(inner)
        self._return += float(reward)
        info = {**info, "return": self._return}
        if self._success_return is not None:
            is_over = bool(terminated or truncated)
            info["is_success"] = is_over and self._return >= self._success_return
        return (
            self._observe(seen),
            float(reward) * self._reward_scale,
            bool(terminated),
            bool(truncated),
            info,
        )

    def close(self) -> None:
        """Close the inner environment."""
        self._env.close()

    def _observe(self, seen: Any) -> Observation:
        return {"state": np.asarray(spaces.flatten(self._seen, seen), np.float32)}


def _action_box(env_id: str, space: spaces.Space[Any]) -> spaces.Box:
    if isinstance(space, spaces.Discrete):
        # One number, rounded: every policy here acts in boxes.
        return spaces.Box(0.0, float(space.n - 1), (1,), np.float32)
    if (
        isinstance(space, spaces.Box)
        and len(space.shape) == 1
        and np.isfinite([space.low, space.high]).all()
    ):
        return spaces.Box(
            space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32
        )
    raise ValueError(
        f"{env_id} takes actions of {space}, expected a Discrete space or a bounded Box [A]."
    )
