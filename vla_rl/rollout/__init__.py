"""Rollout: run episodes as coroutines and hand over complete groups. No torch.

Generation runs as far ahead of the learner as staleness allows.

agents        `async def agent(env, policy) -> Trajectory`, and the embodied one
chat          `chat_agent`, which acts in any text environment
engines       `ActionEngine` and `ChatEngine`: the two kinds of engine that episodes ask
attempts      `Attempts`: how often an episode that is lost is run again
batching      `DynamicBatcher`: batches the requests that wait, for engines
groups        `GroupSource`: an endless, shuffled, resumable source of starts
staleness     `StalenessPolicy`: when a group may begin, and which one an update takes
player        `EpisodePlayer`: runs an episode, here (`LocalPlayer`) or on other hosts
scheduler     `EpisodeScheduler`: runs, repeats, filters, hands over and accounts for every episode
"""

from vla_rl.rollout.agents import embodied_agent, owned_chunk, owned_copy, stop_reason
from vla_rl.rollout.attempts import Attempts
from vla_rl.rollout.batching import BatchStats, DynamicBatcher
from vla_rl.rollout.chat import ChatLimits, chat_agent
from vla_rl.rollout.config import SchedulerConfig
from vla_rl.rollout.engines import ActionEngine, ChatEngine
from vla_rl.rollout.episode_book import SchedulerState
from vla_rl.rollout.groups import GroupPlan, GroupSource, SourceState, TaskStart
from vla_rl.rollout.ledger import EpisodeLedger, LedgerState
from vla_rl.rollout.outstanding import GroupState
from vla_rl.rollout.player import EpisodePlayer, LocalPlayer
from vla_rl.rollout.playing import EpisodeLost, play_episode
from vla_rl.rollout.policies import (
    AnyEngine,
    DecisionCounts,
    DecisionGauge,
    EngineTeam,
    EpisodePolicy,
)
from vla_rl.rollout.scheduler import EpisodeScheduler
from vla_rl.rollout.staleness import StalenessPolicy

__all__ = [
    "ActionEngine",
    "AnyEngine",
    "Attempts",
    "BatchStats",
    "ChatEngine",
    "ChatLimits",
    "DecisionCounts",
    "DecisionGauge",
    "DynamicBatcher",
    "EngineTeam",
    "EpisodeLedger",
    "EpisodeLost",
    "EpisodePlayer",
    "EpisodePolicy",
    "EpisodeScheduler",
    "GroupPlan",
    "GroupSource",
    "GroupState",
    "LedgerState",
    "LocalPlayer",
    "SchedulerConfig",
    "SchedulerState",
    "SourceState",
    "StalenessPolicy",
    "TaskStart",
    "chat_agent",
    "embodied_agent",
    "owned_chunk",
    "owned_copy",
    "play_episode",
    "stop_reason",
]
