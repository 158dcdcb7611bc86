"""Shared parts of the recipes whose text environments come from another library."""

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from vla_rl.algorithms.losses import PolicyLossConfig
from vla_rl.cli.launch import launch
from vla_rl.cli.memory_plan import EpisodeFootprint
from vla_rl.engines import EngineConfig
from vla_rl.errors import ConfigError
from vla_rl.evaluation.validation import Validation
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.models import language
from vla_rl.pipelines.config import RunConfig, TextTrainingConfig
from vla_rl.rollout import ChatLimits, SchedulerConfig, TaskStart, chat_agent
from vla_rl.types import NonNegativeInt, PositiveInt, Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vla_rl.cli.command_line import Command, TrainingLaunch


class ForeignTrainingConfig(TextTrainingConfig, frozen=True, kw_only=True):
    """Reinforcement learning of a language policy in environments of another library."""

    run: RunConfig = RunConfig(name="grpo_foreign", updates=20, checkpoint_every=10)
    group_size: PositiveInt = 8
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=8, max_staleness=1)
    chat: ChatLimits = ChatLimits(max_turns=8, max_reply=128)
    engine: EngineConfig = EngineConfig(
        max_batch=32, kept_conversations=32, max_context=2048, max_reply=128
    )
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=1e-5, warmup_steps=2),
        loss=PolicyLossConfig(clip_low=0.2, clip_high=0.28),
        micro_batch=16,
        micro_batch_tokens=8192,
    )

    policy: str = language.SMOLLM2
    """smollm2, or the folder, GGUF file or hub id of another causal language model with a chat
    template."""

    num_validation: NonNegativeInt = 0
    """Starts held out from training, for validation before the first update and after the last. 0:
    none."""

    num_tries: PositiveInt = 4
    """Episodes of each held-out start."""


def read_object(text: str, option: str) -> dict[str, Any]:
    """Read an option that is a JSON object. Raises: ConfigError if it is none."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{option}={text!r}, expected a JSON object such as '{{\"size\": 100}}': {error}"
        ) from error


async def launch_foreign(
    command: "Command[TrainingLaunch, Any]",
    trained: "Sequence[TaskStart]",
    held_out: "Sequence[TaskStart]",
) -> int:
    """Plan, draw or train on these starts, as the command line says; return the exit status."""
    config: ForeignTrainingConfig = command.config
    footprint = EpisodeFootprint(
        what_runs=trained[0].task,
        simulator_mb=0,
        server_mb=0,
        # tokens, log-probs and what the trainer adds to each
        chunk_bytes=16 * (config.engine.max_context or 4096),
        num_chunks=1,
    )
    evaluator = None
    if held_out:
        agent = partial(chat_agent, limits=config.chat)
        sampling = Sampling(temperature=config.temperature)
        evaluator = Validation(held_out, config.num_tries, agent, sampling)
    model = language.load_language_model(config.policy)
    return await launch(command, trained, model, footprint, evaluator=evaluator)
