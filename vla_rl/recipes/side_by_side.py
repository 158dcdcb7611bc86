"""A robot and a language agent learn in one run: `python -m vla_rl.recipes.side_by_side`.

    starts ─► one scheduler ─┬► reaching, simulated     ─► "robot"    ─┐                  ┌─► learner of "robot"
     (kinds take turns)      └► sums with a calculator  ─► "language" ─┴► buffer ─► graph ─► learner of "language"

Groups of both kinds are in flight at any time; an update uses those that complete first, and each
policy learns from its own groups. The robot is that of `srpo_toy`, from random weights; the
language agent is that of `grpo_text`, from the shipped base policy. Any other two policies work
too.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

import vla_rl
from vla_rl.commands.command_line import Command, TrainingLaunch, run_recipe
from vla_rl.commands.launching import launch
from vla_rl.commands.plan import EpisodeFootprint
from vla_rl.engines import EngineConfig
from vla_rl.envs.text import TextPoolConfig, is_text_task
from vla_rl.errors import ConfigError
from vla_rl.evaluation.playing import within_range
from vla_rl.learning import LearnerConfig, OptimizerConfig
from vla_rl.models import language
from vla_rl.nodes.rewards import RewardConfig
from vla_rl.pipelines.config import MixedTrainingConfig, RunConfig
from vla_rl.recipes import grpo_text, srpo_toy
from vla_rl.rollout import ChatLimits, SchedulerConfig, TaskStart, chat_agent, embodied_agent
from vla_rl.simulation import SimulatorConfig
from vla_rl.types import DEFAULT_AGENT, Agent, Roster, Trajectory, by_member

if TYPE_CHECKING:
    from vla_rl.training.team import Team

ROBOT, LANGUAGE = "robot", "language"


class SideBySideConfig(MixedTrainingConfig, frozen=True, kw_only=True):
    """Reinforcement learning of a robot that reaches and a language agent that solves sums, in one
    run.
    """

    run: RunConfig = RunConfig(name="side_by_side", updates=24, checkpoint_every=12)
    group_size: int = 8
    reward: RewardConfig = RewardConfig(function="success")
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=16, max_staleness=1)
    simulators: SimulatorConfig = SimulatorConfig(num_envs=4)
    text: TextPoolConfig = TextPoolConfig(num_envs=32)
    chat: ChatLimits = ChatLimits(max_turns=6, max_reply=32)
    engine: EngineConfig = EngineConfig(max_batch=32, kept_conversations=64, max_reply=32)
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=4, decay_steps=24),
        entropy_coef=0.01,
        micro_batch_tokens=8192,
    )
    """Learner of both policies. The next two fields replace its optimizer and entropy_coef for the
    language policy."""

    language_optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3, warmup_steps=2)
    """Optimizer of the language policy."""

    language_entropy_coef: float = 0.0
    """Entropy coefficient of the language policy. 0 by default: only the robot's random weights
    need exploration."""

    policy: str = str(grpo_text.ARITHMETIC_BASE)
    """Folder (such as `sft_text` writes) or hub id of the language policy to start from."""

    num_operators: int = 2
    """Operations in a sum."""

    num_digits: int = 1
    """Digits of each number in a sum."""

    robot_share: float = 0.5
    """Share of the groups that are the robot's, above 0 and below 1."""

    num_starts: int = 4096
    """Number of starts in an epoch, of both kinds together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            0.0 < self.robot_share < 1.0,
            "robot_share",
            "between 0 and 1, so that both kinds are run",
        )
        self.require(self.num_starts >= 2, "num_starts", "at least 2, one of each kind")


def play_either(limits: ChatLimits) -> Agent:
    """Return an agent that acts in simulators with the policy "robot" and in text environments with
    "language".

    If several agents share a text environment, each acts with the policy of its name. An episode
    raises ConfigError if there is no such policy.
    """

    async def play(env: Any, policies: Any) -> Trajectory:
        is_text = is_text_task(env.episode.env)
        policies = by_member(policies)
        is_shared = Roster(policies).acts_for_all
        if is_shared or not (is_text or ROBOT in policies):
            names = "all environments" if is_shared else sorted(policies)
            raise ConfigError(
                f"{env.episode.env.id!r} needs the policy {ROBOT!r}, but there is only one for "
                f"{names}; train a Team "
                f"with the members {ROBOT!r} and {LANGUAGE!r}"
            )
        if not is_text:
            return with_agent(await within_range(embodied_agent)(env, policies[ROBOT]), ROBOT)
        speakers = dict(policies)
        if LANGUAGE in policies:
            speakers[DEFAULT_AGENT] = policies[LANGUAGE]
        return with_agent(await chat_agent(env, speakers, limits=limits), LANGUAGE)

    return play


def with_agent(trajectory: Trajectory, name: str) -> Trajectory:
    """Return the episode with `name` as the agent of decisions that have none.

    The policy of that name learns from them.
    """
    steps = tuple(
        msgspec.structs.replace(step, agent=name) if step.agent == DEFAULT_AGENT else step
        for step in trajectory.steps
    )
    return msgspec.structs.replace(trajectory, steps=steps)


def mixed(
    robot: Sequence[TaskStart], language: Sequence[TaskStart], robot_share: float, num: int
) -> list[TaskStart]:
    """Return `num` starts of both kinds in this proportion, at least one of each.

    Starts repeat if there are too few.
    """
    num_robot = min(max(round(robot_share * num), 1), num - 1)
    return [
        *(robot[number % len(robot)] for number in range(num_robot)),
        *(language[number % len(language)] for number in range(num - num_robot)),
    ]


def starts_of(config: SideBySideConfig) -> list[TaskStart]:
    """Return starts of both kinds."""
    sums = grpo_text.GrpoTextConfig(
        run=RunConfig(seed=config.run.seed),
        num_operators=config.num_operators,
        num_digits=config.num_digits,
        num_starts=config.num_starts,
        num_validation=0,
    )
    language = grpo_text.training_starts(sums)
    return mixed(srpo_toy.starts_of(_toy(config)), language, config.robot_share, config.num_starts)


def team_of(config: SideBySideConfig) -> "Team":
    """Make the team of both policies; each learns in every update from its own groups."""
    speaking = msgspec.structs.replace(
        config.learner,
        optimizer=config.language_optimizer,
        entropy_coef=config.language_entropy_coef,
    )
    return vla_rl.Team(
        {
            ROBOT: vla_rl.Member(srpo_toy.policy_of(_toy(config))),
            LANGUAGE: vla_rl.Member(
                language.CausalLanguageModel.load(config.policy), learner=speaking
            ),
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
    return await launch(
        command, starts_of(config), team_of(config), footprint, agent=play_either(config.chat)
    )


def cli() -> int:
    """Run the command line; return the exit status."""
    return run_recipe(TrainingLaunch, SideBySideConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
