"""Who plays the episodes of a training run, where nobody says so."""

from functools import partial
from pathlib import Path

from vla_rl.recipes.training_config import LearningConfig, TextTrainingConfig
from vla_rl.rollout import chat_agent, embodied_agent
from vla_rl.types import Agent


def agent_of(config: LearningConfig) -> Agent:
    """`chat_agent` in text environments, else `embodied_agent`, which also records where `config.run.record_to` is set."""
    if isinstance(config, TextTrainingConfig):
        return partial(chat_agent, limits=config.chat)
    if config.run.record_to is None:
        return embodied_agent
    from vla_rl.data import LeRobotWriter  # only where episodes are recorded
    from vla_rl.recipes.recording import EpisodeRecorder

    return EpisodeRecorder(LeRobotWriter(Path(config.run.record_to))).agent
