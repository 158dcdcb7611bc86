"""Simulator processes as a `VecEnv` of stable-baselines3.

That is imported only here and not installed with vla_rl.

from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecMonitor
from vla_rl.env_workers.stable_baselines import make_sb3_vec

envs = VecMonitor(make_sb3_vec("CartPole-v1", num_envs=8))
PPO("MlpPolicy", envs).learn(50_000)
envs.close()
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from vla_rl.env_workers.vector import ProcessVectorEnv, make_vec
from vla_rl.types import EnvSpec
from vla_rl.util.imports import import_path

try:
    from stable_baselines3.common.vec_env.base_vec_env import VecEnv
except ImportError as error:
    raise ImportError(
        f"stable-baselines3 cannot be imported ({error}); run `pip install "
        "'stable-baselines3>=2.7'`"
    ) from error


def make_sb3_vec(env: EnvSpec | str, num_envs: int, **options: Any) -> "Sb3VecEnv":
    """Make `num_envs` copies of one environment in processes of their own.

    `options` are those of `make_vec`.
    """
    return Sb3VecEnv(make_vec(env, num_envs, autoreset_mode=AutoresetMode.SAME_STEP, **options))


class Sb3VecEnv(VecEnv):  # type: ignore[misc]  # a class of a package that type checkers do not know here
    """Returns the same as stable-baselines3's own `DummyVecEnv`.

    That is, for the same environments, seeds and actions.
    """

    def __init__(self, envs: ProcessVectorEnv) -> None:
        if envs.autoreset_mode is not AutoresetMode.SAME_STEP:
            raise ValueError(
                f"autoreset_mode is {envs.autoreset_mode}, expected SAME_STEP, as "
                "stable-baselines3 resets; use make_sb3_vec"
            )
        self._envs = envs
        self._actions: Any = None
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> Any:
        """Begin an episode in all environments, with the seeds and options that were set.

        Return the observations.
        """
        options = [each or None for each in self._options]
        observations, infos = self._envs.reset_rows(range(self.num_envs), self._seeds, options)
        self.reset_infos = [infos[row] for row in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        return observations

    def step_async(self, actions: np.ndarray) -> None:
        """Store the actions for `step_wait`."""
        self._actions = actions

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Run one control step in all environments.

        An environment whose episode ends begins its next one.
        """
        observations, answers = self._envs.step_rows(self._actions)
        rewards, dones, infos = [], [], []
        for row, (reward, terminated, truncated, info, final) in enumerate(answers):
            told = dict(info if final is None else final["final_info"])
            told["TimeLimit.truncated"] = truncated and not terminated
            if final is not None:
                told["terminal_observation"] = final["final_obs"]
                self.reset_infos[row] = info
            rewards.append(reward)
            dones.append(terminated or truncated)
            infos.append(told)
        return observations, np.array(rewards, np.float32), np.array(dones, np.bool_), infos

    def close(self) -> None:
        """Close all environments and end their processes."""
        self._envs.close()

    def get_images(self) -> Sequence[np.ndarray | None]:
        """Return an image of each environment; None for each if it does not render."""
        return self._envs.render() if self.render_mode == "rgb_array" else [None] * self.num_envs

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute of some environments, or of all."""
        return self._envs.call_rows([*self._get_indices(indices)], attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of some environments, or of all, to one value."""
        rows = [*self._get_indices(indices)]
        self._envs.set_attr_rows(rows, attr_name, [value] * len(rows))

    def env_method(
        self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any
    ) -> list[Any]:
        """Return the results of a method of some environments, or of all."""
        return self._envs.call_rows(
            [*self._get_indices(indices)], method_name, *method_args, **method_kwargs
        )

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        """Return whether some environments, or all, have a wrapper of this class."""
        is_wrapped = import_path(wrapper_class) in self._envs.wrapper_classes
        return [is_wrapped for _ in self._get_indices(indices)]
