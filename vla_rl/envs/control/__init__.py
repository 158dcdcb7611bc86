"""Gymnasium's own small environments, in the words that policies and agents speak here."""

from vla_rl.envs.control.env import ControlEnv

__all__ = ["ControlEnv"]
