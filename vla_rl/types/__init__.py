"""The types that every part of vla_rl shares.

Observations, messages, episodes, trajectories, handles, and the base of configurations.

Fast to import: no torch, no simulator, no model.

The names below are imported on first use: the process of a sandbox needs the base of configurations
alone, which does without NumPy.
"""

from typing import TYPE_CHECKING

from vla_rl.util.imports import lazy_names

if TYPE_CHECKING:
    from vla_rl.types.agent_parts import (
        AgentPart as AgentPart,
        agents_of as agents_of,
        parts_of as parts_of,
    )
    from vla_rl.types.config import Config as Config
    from vla_rl.types.episode import (
        EnvSpec as EnvSpec,
        EpisodeSpec as EpisodeSpec,
        Sampling as Sampling,
        WrapperSpec as WrapperSpec,
    )
    from vla_rl.types.language import (
        DEFAULT_AGENT as DEFAULT_AGENT,
        Completion as Completion,
        FinishReason as FinishReason,
        LanguagePolicies as LanguagePolicies,
        LanguagePolicy as LanguagePolicy,
        Message as Message,
        Prompt as Prompt,
        TextEnv as TextEnv,
        TextOutcome as TextOutcome,
        TextStart as TextStart,
        TokenReport as TokenReport,
        ToolCall as ToolCall,
        ToolSpec as ToolSpec,
    )
    from vla_rl.types.log_probs import (
        MAX_LOG_PROB as MAX_LOG_PROB,
        first_impossible as first_impossible,
    )
    from vla_rl.types.observation import (
        Info as Info,
        Observation as Observation,
        images_of as images_of,
        observed_conversation as observed_conversation,
    )
    from vla_rl.types.protocols import (
        Agent as Agent,
        Env as Env,
        EnvPool as EnvPool,
        Policy as Policy,
    )
    from vla_rl.types.reply_options import (
        ANY_REPLY as ANY_REPLY,
        ChoiceFormat as ChoiceFormat,
        GrammarFormat as GrammarFormat,
        JsonFormat as JsonFormat,
        RegexFormat as RegexFormat,
        ReplyFormat as ReplyFormat,
        ReplyOptions as ReplyOptions,
        ToolRule as ToolRule,
    )
    from vla_rl.types.roster import (
        SOLE_MEMBER as SOLE_MEMBER,
        Roster as Roster,
        by_member as by_member,
    )
    from vla_rl.types.seeds import derive_seed as derive_seed
    from vla_rl.types.shelved import Shelved as Shelved, ShelvedArray as ShelvedArray
    from vla_rl.types.struct import ExplainsFields as ExplainsFields
    from vla_rl.types.trajectory import (
        ActionChunk as ActionChunk,
        ChunkOutcome as ChunkOutcome,
        DecisionRewards as DecisionRewards,
        Deposit as Deposit,
        Group as Group,
        Step as Step,
        StopReason as StopReason,
        Trajectory as Trajectory,
    )


__getattr__, __dir__ = lazy_names(__name__)
