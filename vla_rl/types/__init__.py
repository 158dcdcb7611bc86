"""The words that every part of vla_rl shares: observations, episodes, trajectories, handles and the config base.

Imports in an instant: no torch, no simulator, no model.
"""

from vla_rl.types.config import Config
from vla_rl.types.episode import EnvSpec, EpisodeSpec, Sampling
from vla_rl.types.observation import Info, Observation
from vla_rl.types.protocols import Agent, Env, EnvPool, Policy
from vla_rl.types.seeds import derive_seed
from vla_rl.types.trajectory import ActionChunk, ChunkOutcome, Group, Step, StopReason, Trajectory

__all__ = [
    "ActionChunk",
    "Agent",
    "ChunkOutcome",
    "Config",
    "Env",
    "EnvPool",
    "EnvSpec",
    "EpisodeSpec",
    "Group",
    "Info",
    "Observation",
    "Policy",
    "Sampling",
    "Step",
    "StopReason",
    "Trajectory",
    "derive_seed",
]
