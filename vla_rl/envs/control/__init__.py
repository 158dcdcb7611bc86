"""Gymnasium's own small environments, with the observation and action keys of this package."""

from vla_rl.envs.control.env import ControlEnv

__all__ = ["ControlEnv"]
