"""The types that every part of vla_rl shares.

Observations, messages, episodes, trajectories, handles, and the base of configurations.

Fast to import: no torch, no simulator, no model.

The names below are imported on first use: the process of a sandbox needs the base of configurations
alone, which does without NumPy.
"""

from typing import TYPE_CHECKING

from vla_rl.lazy_names import lazy_names

if TYPE_CHECKING:
    from vla_rl.types.agent_parts import AgentPart, agents_of, parts_of
    from vla_rl.types.config import Config
    from vla_rl.types.episode import EnvSpec, EpisodeSpec, Sampling, WrapperSpec
    from vla_rl.types.language import (
        DEFAULT_AGENT,
        Completion,
        FinishReason,
        LanguagePolicies,
        LanguagePolicy,
        Message,
        Prompt,
        TextEnv,
        TextOutcome,
        TextStart,
        TokenReport,
        ToolCall,
        ToolSpec,
    )
    from vla_rl.types.log_probs import MAX_LOG_PROB, first_impossible
    from vla_rl.types.observation import Info, Observation, images_of, observed_conversation
    from vla_rl.types.protocols import Agent, Env, EnvPool, Policy
    from vla_rl.types.reply_options import (
        ANY_REPLY,
        ChoiceFormat,
        GrammarFormat,
        JsonFormat,
        RegexFormat,
        ReplyFormat,
        ReplyOptions,
        ToolRule,
    )
    from vla_rl.types.roster import SOLE_MEMBER, Roster, by_member
    from vla_rl.types.seeds import derive_seed
    from vla_rl.types.shelved import Shelved, ShelvedArray
    from vla_rl.types.struct import ExplainsFields
    from vla_rl.types.trajectory import (
        ActionChunk,
        ChunkOutcome,
        DecisionRewards,
        Deposit,
        Group,
        Step,
        StopReason,
        Trajectory,
    )

__all__ = [
    "ANY_REPLY",
    "DEFAULT_AGENT",
    "MAX_LOG_PROB",
    "SOLE_MEMBER",
    "ActionChunk",
    "Agent",
    "AgentPart",
    "ChoiceFormat",
    "ChunkOutcome",
    "Completion",
    "Config",
    "DecisionRewards",
    "Deposit",
    "Env",
    "EnvPool",
    "EnvSpec",
    "EpisodeSpec",
    "ExplainsFields",
    "FinishReason",
    "GrammarFormat",
    "Group",
    "Info",
    "JsonFormat",
    "LanguagePolicies",
    "LanguagePolicy",
    "Message",
    "Observation",
    "Policy",
    "Prompt",
    "RegexFormat",
    "ReplyFormat",
    "ReplyOptions",
    "Roster",
    "Sampling",
    "Shelved",
    "ShelvedArray",
    "Step",
    "StopReason",
    "TextEnv",
    "TextOutcome",
    "TextStart",
    "TokenReport",
    "ToolCall",
    "ToolRule",
    "ToolSpec",
    "Trajectory",
    "WrapperSpec",
    "agents_of",
    "by_member",
    "derive_seed",
    "first_impossible",
    "images_of",
    "observed_conversation",
    "parts_of",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "agent_parts": ("AgentPart", "agents_of", "parts_of"),
        "config": ("Config",),
        "episode": ("EnvSpec", "EpisodeSpec", "Sampling", "WrapperSpec"),
        "language": (
            "DEFAULT_AGENT",
            "Completion",
            "FinishReason",
            "LanguagePolicies",
            "LanguagePolicy",
            "Message",
            "Prompt",
            "TextEnv",
            "TextOutcome",
            "TextStart",
            "TokenReport",
            "ToolCall",
            "ToolSpec",
        ),
        "log_probs": ("MAX_LOG_PROB", "first_impossible"),
        "observation": ("Info", "Observation", "images_of", "observed_conversation"),
        "protocols": ("Agent", "Env", "EnvPool", "Policy"),
        "reply_options": (
            "ANY_REPLY",
            "ChoiceFormat",
            "GrammarFormat",
            "JsonFormat",
            "RegexFormat",
            "ReplyFormat",
            "ReplyOptions",
            "ToolRule",
        ),
        "roster": ("SOLE_MEMBER", "Roster", "by_member"),
        "seeds": ("derive_seed",),
        "shelved": ("Shelved", "ShelvedArray"),
        "struct": ("ExplainsFields",),
        "trajectory": (
            "ActionChunk",
            "ChunkOutcome",
            "DecisionRewards",
            "Deposit",
            "Group",
            "Step",
            "StopReason",
            "Trajectory",
        ),
    },
)
