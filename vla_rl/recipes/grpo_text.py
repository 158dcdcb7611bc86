"""A language agent learns to use a tool: `python -m vla_rl.recipes.grpo_text`.

The tasks are sums such as 3+8-7=?, with a calculator that does one operation per call: two calls
and an answer, in three turns. The shipped base policy (small, made by `sft_text`) knows how to call
the calculator and half knows when; a correct answer that was calculated earns 1. `--pipeline ppo`,
`dapo`, `gspo` or `cpgd` trains it with another pipeline.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import vla_rl
from vla_rl.algorithms.losses import PolicyLossConfig
from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.launch import launch, run_recipe
from vla_rl.cli.memory_plan import EpisodeFootprint
from vla_rl.engines import EngineConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.envs.text.arithmetic import draw_problem
from vla_rl.errors import ConfigError
from vla_rl.evaluation.validation import Validation
from vla_rl.learner import CriticConfig, LearnerConfig, OptimizerConfig
from vla_rl.models import language
from vla_rl.pipelines.config import RunConfig, TextTrainingConfig
from vla_rl.rollout import ChatLimits, SchedulerConfig, TaskStart, chat_agent
from vla_rl.types import EnvSpec, NonNegativeInt, PositiveInt, ReadIf, Sampling, derive_seed

if TYPE_CHECKING:
    from vla_rl.team.members import Trainable


ENV_ID = "text/arithmetic"
OPERATORS: Final = "+-"
MAX_DRAWS: Final = 100
"""Draws for each wanted sum; if they do not find it, there are too few different sums."""

ARITHMETIC_BASE: Final = Path(vla_rl.__file__).parent / "assets" / "arithmetic_base"


class GrpoTextConfig(TextTrainingConfig, frozen=True, kw_only=True):
    """Reinforcement learning of a small language policy on sums with a calculator."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (ReadIf(("num_tries",), "num_validation"),)

    run: RunConfig = RunConfig(name="grpo_text", updates=40, checkpoint_every=20)
    group_size: PositiveInt = 8
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=16, max_staleness=1)
    text: TextPoolConfig = TextPoolConfig(num_envs=64)
    chat: ChatLimits = ChatLimits(max_turns=6, max_reply=32)
    engine: EngineConfig = EngineConfig(max_batch=64, kept_conversations=64, max_reply=32)
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=2),
        loss=PolicyLossConfig(clip_low=0.2, clip_high=0.2),
        micro_batch=128,
        micro_batch_tokens=8192,
    )
    critic: CriticConfig = CriticConfig(
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0), micro_batch_tokens=8192, epochs=2
    )

    policy: str = str(ARITHMETIC_BASE)
    """Folder (such as `sft_text` writes) or hub id of the checkpoint to start from: any causal
    language model with a chat template. The default ships with the package and solves three sums of
    ten."""

    num_operators: int = 2
    """Operations in a sum."""

    num_digits: int = 1
    """Digits of each number in a sum."""

    num_starts: PositiveInt = 4096
    """Draws of sums to train on; some are equal if the sums are small."""

    num_validation: NonNegativeInt = 64
    """Different sums for validation before the first update and after the last; they are never
    trained on. 0: none."""

    num_tries: PositiveInt = 4
    """Episodes of each validation sum."""

    @property
    def env(self) -> EnvSpec:
        """Specification of the environment."""
        kwargs = {
            "num_operators": self.num_operators,
            "num_digits": self.num_digits,
            "operators": OPERATORS,
        }
        return EnvSpec(id=ENV_ID, kwargs=kwargs)


def training_starts(config: GrpoTextConfig) -> list[TaskStart]:
    """Return sums to train on, none of them a validation sum.

    Raises: ConfigError if too few are left.
    """
    # by their text, as two seeds may draw the same sum
    held_out = {_sum_text(config, start.seed) for start in validation_starts(config)}
    seeds: list[int] = []
    for seed in _derive_seeds(config, "train", MAX_DRAWS * config.num_starts):
        if _sum_text(config, seed) not in held_out:
            seeds.append(seed)
        if len(seeds) == config.num_starts:
            return _make_starts(config, seeds)
    raise ConfigError(
        f"num_validation is {config.num_validation}, which leaves too few sums to train on of "
        f"those with num_operators={config.num_operators} and num_digits={config.num_digits}; take "
        "fewer, or larger sums"
    )


def validation_starts(config: GrpoTextConfig) -> list[TaskStart]:
    """Return different sums for validation. Raises: ConfigError if there are too few."""
    seeds: dict[str, int] = {}
    for seed in _derive_seeds(config, "validation", MAX_DRAWS * config.num_validation):
        # a sum that is validated twice would count twice
        seeds.setdefault(_sum_text(config, seed), seed)
        if len(seeds) == config.num_validation:
            break
    if len(seeds) < config.num_validation:
        raise ConfigError(
            f"num_validation is {config.num_validation}, but only {len(seeds)} different sums were "
            f"found with num_operators={config.num_operators} and num_digits={config.num_digits}; "
            "take fewer, or larger sums"
        )
    return _make_starts(config, list(seeds.values()))


def _derive_seeds(config: GrpoTextConfig, kind: str, num: int) -> Iterator[int]:
    return (derive_seed(config.run.seed, kind, number) % 2**31 for number in range(num))


def _sum_text(config: GrpoTextConfig, seed: int) -> str:
    """Return the text of the sum that the environment draws from a seed."""
    # drawn as the environment draws it, since there is no other list of the sums
    return draw_problem(
        seed, num_operators=config.num_operators, num_digits=config.num_digits, operators=OPERATORS
    ).text


def _make_starts(config: GrpoTextConfig, seeds: Sequence[int]) -> list[TaskStart]:
    env = config.env
    return [TaskStart(env=env, task=env.id, seed=seed) for seed in seeds]


def make_validation(config: GrpoTextConfig) -> Validation | None:
    """Return the validation of the run; None if `num_validation` is 0."""
    if config.num_validation == 0:
        return None
    starts = validation_starts(config)
    agent = partial(chat_agent, limits=config.chat)
    return Validation(starts, config.num_tries, agent, Sampling(temperature=config.temperature))


async def launch_text(command: Command[TrainingLaunch, Any], model: "Trainable") -> int:
    """Plan, draw or train `model`, as the command line says."""
    config: GrpoTextConfig = command.config
    footprint = EpisodeFootprint(
        what_runs=config.env.id,
        simulator_mb=0,
        server_mb=0,
        chunk_bytes=4096,
        num_chunks=config.chat.max_turns,
    )
    return await launch(
        command, training_starts(config), model, footprint, evaluator=make_validation(config)
    )


async def main(command: Command[TrainingLaunch, GrpoTextConfig]) -> int:
    """Plan, draw or train, as the command line says."""
    return await launch_text(command, language.load_language_model(command.config.policy))


cli = partial(run_recipe, TrainingLaunch, GrpoTextConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
