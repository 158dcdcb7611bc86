"""The words that every part of vla_rl shares: observations, messages, episodes, trajectories, handles, the config base.

Imports in an instant: no torch, no simulator, no model.
"""

from vla_rl.types.agent_parts import AgentPart, agents_of, parts_of
from vla_rl.types.config import Config
from vla_rl.types.episode import EnvSpec, EpisodeSpec, Sampling
from vla_rl.types.language import (
    DEFAULT_AGENT,
    Completion,
    FinishReason,
    LanguagePolicy,
    Message,
    TextEnv,
    TextOutcome,
    TextStart,
    ToolCall,
    ToolSpec,
)
from vla_rl.types.observation import Info, Observation
from vla_rl.types.protocols import Agent, Env, EnvPool, Policy
from vla_rl.types.seeds import derive_seed
from vla_rl.types.trajectory import ActionChunk, ChunkOutcome, Group, Step, StopReason, Trajectory

__all__ = [
    "DEFAULT_AGENT",
    "ActionChunk",
    "Agent",
    "AgentPart",
    "ChunkOutcome",
    "Completion",
    "Config",
    "Env",
    "EnvPool",
    "EnvSpec",
    "EpisodeSpec",
    "FinishReason",
    "Group",
    "Info",
    "LanguagePolicy",
    "Message",
    "Observation",
    "Policy",
    "Sampling",
    "Step",
    "StopReason",
    "TextEnv",
    "TextOutcome",
    "TextStart",
    "ToolCall",
    "ToolSpec",
    "Trajectory",
    "agents_of",
    "derive_seed",
    "parts_of",
]
