"""Rollout: run episodes as coroutines and hand over complete groups. No torch.

Generation runs as far ahead of the learner as staleness allows.

agents            `async def agent(env, policy) -> Trajectory`, the embodied one, and checks of what comes out
experts           experts that may act instead of a policy: scripted ones, other policies
expert_agent      the agent that lets an expert act at some decisions, and labels decisions
chat_agent        `chat_agent`, which acts in any text environment
planner_agent     `planner_agent`, in which a language policy calls a robot's policy as a tool
engines           `ActionEngine` and `ChatEngine`: the two kinds of engine that episodes ask; `DynamicBatcher`
                  batches the requests that wait, for engines
policies          the policy that one episode gets of an engine, or of a team of them
groups            `GroupSource`: an endless, shuffled, resumable source of starts
staleness         `StalenessPolicy`: when a group may begin, and which one an update takes
real_time         the agent whose world goes on while the policy decides
episode_runner    `EpisodeRunner`: runs an episode, here (`LocalEpisodeRunner`) or on other hosts
episode_tasks     the asyncio tasks in which episodes run
episode_records   where each episode is that was dispatched and has not left yet
counts            conservation, losses, filters, metrics
scheduler         `EpisodeScheduler`: runs, repeats, filters, hands over and accounts for every episode
"""

from vla_rl.rollout.agents import (
    copy_arrays as copy_arrays,
    copy_chunk as copy_chunk,
    embodied_agent as embodied_agent,
    stop_reason as stop_reason,
)
from vla_rl.rollout.chat_agent import ChatLimits as ChatLimits, chat_agent as chat_agent
from vla_rl.rollout.counts import Attempts as Attempts, EpisodeLedger as EpisodeLedger
from vla_rl.rollout.engines import (
    ActionEngine as ActionEngine,
    BatchStats as BatchStats,
    DynamicBatcher as DynamicBatcher,
)
from vla_rl.rollout.episode_records import SchedulerState as SchedulerState
from vla_rl.rollout.episode_runner import (
    EpisodeLost as EpisodeLost,
    EpisodeRunner as EpisodeRunner,
    LocalEpisodeRunner as LocalEpisodeRunner,
    run_episode as run_episode,
)
from vla_rl.rollout.groups import (
    GroupSource as GroupSource,
    SourceState as SourceState,
    TaskStart as TaskStart,
)
from vla_rl.rollout.planner_agent import (
    PlannerConfig as PlannerConfig,
    planner_agent as planner_agent,
)
from vla_rl.rollout.policies import (
    AnyEngine as AnyEngine,
    DecisionCounter as DecisionCounter,
    DecisionCounts as DecisionCounts,
    EngineTeam as EngineTeam,
    EpisodePolicy as EpisodePolicy,
)
from vla_rl.rollout.real_time import (
    RealTimeConfig as RealTimeConfig,
    make_real_time_agent as make_real_time_agent,
)
from vla_rl.rollout.scheduler import EpisodeScheduler as EpisodeScheduler
from vla_rl.rollout.staleness import SchedulerConfig as SchedulerConfig
