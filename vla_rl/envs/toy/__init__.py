"""Tiny environments without a simulator: one with a known optimum, one that misbehaves.

`vla_rl/toy_reach-v0` is `reach.ToyReachEnv`; `vla_rl/faulty-v0` is `faulty.FaultyEnv`.
"""

from vla_rl.envs.toy.faulty import FaultyEnv
from vla_rl.envs.toy.reach import ToyReachEnv

__all__ = ["FaultyEnv", "ToyReachEnv"]
