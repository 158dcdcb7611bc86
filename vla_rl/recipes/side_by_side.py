"""A robot and a language agent learn in one run: `python -m vla_rl.recipes.side_by_side`.

    starts ─► one scheduler ─┬► reaching, in simulators ─► "robot"    ─┐                  ┌─► learner of "robot"
     (kinds take turns)      └► sums with a calculator  ─► "language" ─┴► one buffer ─► one graph ─► learner of "language"

Groups of both kinds are in flight at any time; an update takes whichever are complete, and each policy learns from its own.
The robot is `srpo_toy`'s, from random weights; the language agent is `grpo_text`'s, from the base that ships. Any
other two do as well.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vla_rl.commands.command_line import Command, TrainingLaunch, run_recipe
from vla_rl.commands.launching import launch
from vla_rl.commands.plan import EpisodeFootprint
from vla_rl.engines import EngineConfig
from vla_rl.envs.text import TextPoolConfig, is_text_task
from vla_rl.errors import ConfigError
from vla_rl.evaluation.playing import within_range
from vla_rl.learning import LearnerConfig, OptimizerConfig
from vla_rl.models.language import CausalLanguageModel
from vla_rl.nodes.rewards import RewardConfig
from vla_rl.pipelines.config import MixedTrainingConfig, RunConfig
from vla_rl.recipes import grpo_text, srpo_toy
from vla_rl.rollout import ChatLimits, SchedulerConfig, TaskStart, chat_agent, embodied_agent
from vla_rl.simulation import SimulatorConfig
from vla_rl.training.team import Member, Team
from vla_rl.types import DEFAULT_AGENT, Agent, Trajectory

ROBOT, LANGUAGE = "robot", "language"


class SideBySideConfig(MixedTrainingConfig, frozen=True, kw_only=True):
    """The reaching task and sums with a calculator, side by side."""

    run: RunConfig = RunConfig(name="side_by_side", updates=24, checkpoint_every=12)
    group_size: int = 8
    reward: RewardConfig = RewardConfig(function="success")
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=16, max_staleness=1)
    simulators: SimulatorConfig = SimulatorConfig(num_envs=4)
    text: TextPoolConfig = TextPoolConfig(num_envs=32)
    chat: ChatLimits = ChatLimits(max_turns=6, max_reply=32)
    engine: EngineConfig = EngineConfig(max_batch=32, kept_conversations=64, max_reply=32)
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=4, decay_steps=24), entropy_coef=0.01, micro_batch_tokens=8192
    )
    """Of both policies, but for what the next two say."""

    language_optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3, warmup_steps=2)
    """Of the language policy."""

    language_entropy_coef: float = 0.0
    """Of the language policy; exploring is what the robot's random weights need."""

    policy: str = str(grpo_text.ARITHMETIC_BASE)
    """Folder of the language policy to start from, such as `sft_text` leaves, or its id on the hub."""

    num_operators: int = 2
    """Operations in a sum."""

    num_digits: int = 1
    """Digits of its numbers."""

    robot_share: float = 0.5
    """Of the groups, how many are the robot's."""

    num_starts: int = 4096
    """Starts of an epoch, of both kinds together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0.0 < self.robot_share < 1.0, "robot_share", "between 0 and 1, so that both are played")
        self.require(self.num_starts >= 2, "num_starts", "at least 2, one of each kind")


def play_either(limits: ChatLimits) -> Agent:
    """An agent that plays simulators with the policy "robot", and text environments with "language" or, where several
    agents share one, with the policy of each by its name.

    Raises while playing: ConfigError where there is no such policy.
    """

    async def play(env: Any, policies: Any) -> Trajectory:
        is_text = is_text_task(env.episode.env)
        if not isinstance(policies, Mapping) or not (is_text or ROBOT in policies):
            names = sorted(policies) if isinstance(policies, Mapping) else "everybody"
            raise ConfigError(
                f"{env.episode.env.id!r} is played by the policy {ROBOT!r}, and there is one for {names}; train a Team "
                f"with the members {ROBOT!r} and {LANGUAGE!r}"
            )
        if not is_text:
            return decided_by(await within_range(embodied_agent)(env, policies[ROBOT]), ROBOT)
        speakers = dict(policies)
        if LANGUAGE in policies:
            speakers[DEFAULT_AGENT] = policies[LANGUAGE]
        return decided_by(await chat_agent(env, speakers, limits=limits), LANGUAGE)

    return play


def decided_by(trajectory: Trajectory, name: str) -> Trajectory:
    """The same episode with a name for who decided, where it had none; that policy learns from it."""
    steps = tuple(
        msgspec.structs.replace(step, agent=name) if step.agent == DEFAULT_AGENT else step for step in trajectory.steps
    )
    return msgspec.structs.replace(trajectory, steps=steps)


def mixed(robot: Sequence[TaskStart], language: Sequence[TaskStart], robot_share: float, num: int) -> list[TaskStart]:
    """`num` starts of both kinds in this proportion, at least one of each; where there are too few of one, they repeat."""
    num_robot = min(max(round(robot_share * num), 1), num - 1)
    return [
        *(robot[number % len(robot)] for number in range(num_robot)),
        *(language[number % len(language)] for number in range(num - num_robot)),
    ]


def starts_of(config: SideBySideConfig) -> list[TaskStart]:
    """Reaching and sums."""
    sums = grpo_text.GrpoTextConfig(
        run=RunConfig(seed=config.run.seed),
        num_operators=config.num_operators,
        num_digits=config.num_digits,
        num_starts=config.num_starts,
        num_validation=0,
    )
    language = grpo_text.training_starts(sums)
    return mixed(srpo_toy.starts_of(_toy(config)), language, config.robot_share, config.num_starts)


def team_of(config: SideBySideConfig) -> Team:
    """Both policies; they learn in every update, each from its own groups."""
    speaking = msgspec.structs.replace(
        config.learner, optimizer=config.language_optimizer, entropy_coef=config.language_entropy_coef
    )
    return Team(
        {
            ROBOT: Member(srpo_toy.policy_of(_toy(config))),
            LANGUAGE: Member(CausalLanguageModel.load(config.policy), learner=speaking),
        }
    )


def _toy(config: SideBySideConfig) -> srpo_toy.SrpoToyConfig:
    return srpo_toy.SrpoToyConfig(run=config.run)


async def main(command: Command[TrainingLaunch, SideBySideConfig]) -> int:
    """Plan, draw or train, as the command line says."""
    config = command.config
    footprint = EpisodeFootprint(
        what_runs="vla_rl/toy_reach-v0",
        simulator_mb=15,
        server_mb=60,
        chunk_bytes=4096,
        num_chunks=config.chat.max_turns,
    )
    return await launch(command, starts_of(config), team_of(config), footprint, agent=play_either(config.chat))


def cli() -> int:
    """The command line."""
    return run_recipe(TrainingLaunch, SideBySideConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
