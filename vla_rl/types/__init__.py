"""The types that every part of vla_rl shares.

Observations, messages, episodes, trajectories, handles, and the base of configurations.

Fast to import: no torch, no simulator, no model.

The names below are imported on first use: the process of a sandbox needs the base of configurations
alone, which does without NumPy.
"""

from typing import TYPE_CHECKING

from vla_rl.util.imports import lazy_names

if TYPE_CHECKING:
    from vla_rl.types.agents import (
        SOLE_MEMBER as SOLE_MEMBER,
        Agent as Agent,
        AgentNames as AgentNames,
        AgentPart as AgentPart,
        Env as Env,
        EnvPool as EnvPool,
        Policy as Policy,
        key_by_member as key_by_member,
        list_agents as list_agents,
        split_by_agent as split_by_agent,
    )
    from vla_rl.types.config import (
        FINITE as FINITE,
        Config as Config,
        ExplainsFields as ExplainsFields,
        NonNegativeFloat as NonNegativeFloat,
        NonNegativeInt as NonNegativeInt,
        PositiveFloat as PositiveFloat,
        PositiveInt as PositiveInt,
        ReadIf as ReadIf,
        Share as Share,
    )
    from vla_rl.types.episode import (
        EnvSpec as EnvSpec,
        EpisodeSpec as EpisodeSpec,
        Sampling as Sampling,
        WrapperSpec as WrapperSpec,
        derive_seed as derive_seed,
    )
    from vla_rl.types.language import (
        ANY_REPLY as ANY_REPLY,
        DEFAULT_AGENT as DEFAULT_AGENT,
        ChoiceFormat as ChoiceFormat,
        Completion as Completion,
        FinishReason as FinishReason,
        GrammarFormat as GrammarFormat,
        JsonFormat as JsonFormat,
        LanguagePolicies as LanguagePolicies,
        LanguagePolicy as LanguagePolicy,
        Message as Message,
        Prompt as Prompt,
        RegexFormat as RegexFormat,
        ReplyFormat as ReplyFormat,
        ReplyOptions as ReplyOptions,
        TextEnv as TextEnv,
        TextOutcome as TextOutcome,
        TextStart as TextStart,
        TokenReport as TokenReport,
        ToolCall as ToolCall,
        ToolRule as ToolRule,
        ToolSpec as ToolSpec,
    )
    from vla_rl.types.observation import (
        DRAWN_KEY as DRAWN_KEY,
        ArrayRef as ArrayRef,
        ImageCacheRef as ImageCacheRef,
        Info as Info,
        Observation as Observation,
        get_images as get_images,
        make_conversation_observation as make_conversation_observation,
        with_drawn as with_drawn,
        with_plan as with_plan,
    )
    from vla_rl.types.trajectory import (
        MAX_LOG_PROB as MAX_LOG_PROB,
        ActionChunk as ActionChunk,
        ChunkOutcome as ChunkOutcome,
        DecisionRewards as DecisionRewards,
        EpisodeRef as EpisodeRef,
        Group as Group,
        Step as Step,
        StopReason as StopReason,
        Trajectory as Trajectory,
        find_impossible_log_prob as find_impossible_log_prob,
    )


__getattr__, __dir__ = lazy_names(__name__)
