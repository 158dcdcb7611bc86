"""Who plays the episodes of a training run."""

import asyncio
from functools import partial
from pathlib import Path

from vla_rl.recipes.training_config import LearningConfig, TextTrainingConfig
from vla_rl.rollout import chat_agent, embodied_agent
from vla_rl.types import Agent


def agent_of(config: LearningConfig) -> Agent:
    """Who plays where nobody says so: `chat_agent` in text environments, else `embodied_agent`."""
    return partial(chat_agent, limits=config.chat) if isinstance(config, TextTrainingConfig) else embodied_agent


async def recorded(agent: Agent, record_to: str | None) -> Agent:
    """The agent, with its episodes recorded into this folder; as it is where there is none."""
    if record_to is None:
        return agent
    from vla_rl.data import LeRobotWriter  # only where episodes are recorded
    from vla_rl.recipes.recording import EpisodeRecorder

    return EpisodeRecorder(await asyncio.to_thread(LeRobotWriter, Path(record_to))).around(agent)
