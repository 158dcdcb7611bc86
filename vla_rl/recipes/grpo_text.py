"""A language agent learns to use a tool: `python -m vla_rl.recipes.grpo_text`.

Sums such as 3+8-7=?, with a calculator that does one operation a call: two calls and an answer, in three turns. The base
that ships (small, made by `sft_text`) knows how to call and half knows when; a right answer that was calculated earns 1.
`--pipeline ppo`, `dapo`, `gspo` or `cpgd` trains it in another way.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

import vla_rl
from vla_rl.engines import CriticConfig, EngineConfig, LearnerConfig, OptimizerConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.models.language import CausalLanguageModel
from vla_rl.recipes.command_line import Command, TrainingLaunch, run_recipe
from vla_rl.recipes.evaluation.validation import Validation
from vla_rl.recipes.launching import launch
from vla_rl.recipes.plan import EpisodeFootprint
from vla_rl.recipes.team import RunModel, Team
from vla_rl.recipes.training_config import RunConfig, TextTrainingConfig
from vla_rl.rollout import ChatLimits, SchedulerConfig, TaskStart, chat_agent
from vla_rl.types import EnvSpec, Sampling, derive_seed

ENV_ID = "text/arithmetic"
ARITHMETIC_BASE: Final = Path(vla_rl.__file__).parent / "assets" / "arithmetic_base"


class GrpoTextConfig(TextTrainingConfig, frozen=True, kw_only=True):
    """Reinforcement learning of a small language policy on sums with a calculator."""

    run: RunConfig = RunConfig(name="grpo_text", updates=40, checkpoint_every=20)
    group_size: int = 8
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=16, max_staleness=1)
    text: TextPoolConfig = TextPoolConfig(num_envs=64)
    chat: ChatLimits = ChatLimits(max_turns=6, max_reply=32)
    engine: EngineConfig = EngineConfig(max_batch=64, kept_conversations=64, max_reply=32)
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=2), micro_batch=128, micro_batch_tokens=8192
    )
    critic: CriticConfig = CriticConfig(
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0), micro_batch_tokens=8192, epochs=2
    )

    policy: str = str(ARITHMETIC_BASE)
    """Folder of the checkpoint to start from, such as `sft_text` leaves, or its id on the hub: any causal language model
    with a chat template. The default ships, and solves three sums of ten."""

    num_operators: int = 2
    """Operations in a sum."""

    num_digits: int = 1
    """Digits of its numbers."""

    num_starts: int = 4096
    """Different sums to train on."""

    num_validation: int = 64
    """Other sums that are played before the first update and after the last; 0 for none."""

    num_tries: int = 4
    """At each of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("num_starts", "num_tries"):
            self.require(getattr(self, field) >= 1, field, "at least 1")
        self.require(self.num_validation >= 0, "num_validation", "at least 0")

    @property
    def env(self) -> EnvSpec:
        """What is played."""
        return EnvSpec(id=ENV_ID, kwargs={"num_operators": self.num_operators, "num_digits": self.num_digits})


def starts_of(config: GrpoTextConfig, kind: str, num: int) -> list[TaskStart]:
    """Episodes of one kind, `train` or `validation`, each drawn from seeds of its own."""
    env = config.env
    return [
        TaskStart(env=env, task=env.id, seed=derive_seed(config.run.seed, kind, number) % 2**31)
        for number in range(num)
    ]


def validation_of(config: GrpoTextConfig) -> Validation | None:
    """What the run is judged by."""
    if config.num_validation == 0:
        return None
    starts = starts_of(config, "validation", config.num_validation)
    agent = partial(chat_agent, limits=config.chat)
    return Validation(starts, config.num_tries, agent, Sampling(temperature=config.temperature))


async def launch_text(command: Command[TrainingLaunch, Any], model: RunModel | Team) -> int:
    """Plan, draw or train `model`, as the command line says."""
    config: GrpoTextConfig = command.config
    footprint = EpisodeFootprint(
        what_runs=config.env.id, simulator_mb=0, server_mb=0, chunk_bytes=4096, num_chunks=config.chat.max_turns
    )
    starts = starts_of(config, "train", config.num_starts)
    return await launch(command, starts, model, footprint, judge=validation_of(config))


async def main(command: Command[TrainingLaunch, GrpoTextConfig]) -> int:
    """Plan, draw or train, as the command line says."""
    return await launch_text(command, CausalLanguageModel.load(command.config.policy))


def cli() -> int:
    """The command line."""
    return run_recipe(TrainingLaunch, GrpoTextConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
