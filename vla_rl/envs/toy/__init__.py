"""Tiny environments that need no simulator: one with a known optimum, and one that misbehaves on
request.

`vla_rl/toy_reach-v0` is `reach.ToyReachEnv`; `vla_rl/faulty-v0` is `faulty.FaultyEnv`.
"""

from vla_rl.envs.toy.faulty import FaultyEnv
from vla_rl.envs.toy.reach import ToyReachEnv

__all__ = ["FaultyEnv", "ToyReachEnv"]
