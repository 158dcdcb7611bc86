"""Policies of several kinds learn in one run: `python -m vla_rl.recipes.side_by_side`.

    starts ─► one scheduler ─┬► reaching or LIBERO      ─► "robot"    ─┐                   ┌► learner of "robot"
     (kinds take turns)      ├► sums with a calculator  ─► "language" ─┼► buffer ─► graph ─┼► learner of "language"
                             └► driving                 ─► "driver"   ─┘                   └► learner of "driver"

Groups of all kinds are in flight at any time; an update uses those that complete first, and each
policy learns from its own groups. The robot is that of `srpo_toy`, from random weights, or with
`--robot libero` that of `srpo_libero`; the language agent is that of `grpo_text`, from the shipped
base policy; with `--driving-share 0.3` there is also a driver, by moves without a route, as
`grpo_navsim`'s. Any other policies work too.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import msgspec

import vla_rl
from vla_rl.algorithms.losses import PolicyLossConfig
from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.launch import launch, run_recipe
from vla_rl.cli.memory_plan import EpisodeFootprint
from vla_rl.engines import EngineConfig
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.text import TextPoolConfig, is_text_task
from vla_rl.errors import ConfigError
from vla_rl.evaluation.run_episodes import embodied_agent_within_range
from vla_rl.evaluation.suites import LIBERO
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.models import language
from vla_rl.models.loading import CheckpointFormat, load_policy
from vla_rl.pipelines.config import MixedTrainingConfig, RunConfig
from vla_rl.pipelines.nodes.rewards import Reward, RewardConfig, environment, success
from vla_rl.recipes import grpo_text, srpo_toy
from vla_rl.recipes.driving_training import DRIVING, training_starts as driving_starts
from vla_rl.recipes.grpo_driving import DrivingConfig
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig
from vla_rl.recipes.suite_training import starting_policy, training_starts as libero_starts
from vla_rl.rollout import ChatLimits, SchedulerConfig, TaskStart, chat_agent
from vla_rl.types import (
    DEFAULT_AGENT,
    Agent,
    AgentNames,
    NonNegativeFloat,
    PositiveInt,
    ReadIf,
    Trajectory,
    key_by_member,
)

if TYPE_CHECKING:
    from vla_rl.team.members import Team


ROBOT, LANGUAGE, DRIVER = "robot", "language", "driver"
SIMULATOR_MB: Final = {"toy": 15, "libero": LIBERO.simulator_mb, "driving": 45, "text": 15}
REWARD: Final = "vla_rl.recipes.side_by_side:solved_or_scored"


class SideBySideConfig(MixedTrainingConfig, frozen=True, kw_only=True):
    """Reinforcement learning of a robot, a language agent and a driver, in one run."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (
        ReadIf(("libero_optimizer",), "robot", ("libero",)),
        ReadIf(("driving_optimizer",), "driving_share"),
    )

    run: RunConfig = RunConfig(name="side_by_side", updates=24, checkpoint_every=12)
    group_size: PositiveInt = 8
    reward: RewardConfig = RewardConfig(function=REWARD)
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=16, max_staleness=1)
    simulators: SimulatorConfig = SimulatorConfig(num_envs=4)
    text: TextPoolConfig = TextPoolConfig(num_envs=32)
    chat: ChatLimits = ChatLimits(max_turns=6, max_reply=32)
    engine: EngineConfig = EngineConfig(max_batch=32, kept_conversations=64, max_reply=32)
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=4, decay_steps=24),
        loss=PolicyLossConfig(clip_low=0.2, clip_high=0.2),
        entropy_coef=0.01,
        micro_batch_tokens=8192,
    )
    """Learner of all policies. The fields below replace its optimizer and entropy_coef for policies
    that do not begin with random weights."""

    language_optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3, warmup_steps=2)
    """Optimizer of the language policy."""

    language_entropy_coef: float = 0.0
    """Entropy coefficient of the language policy. 0 by default: only the robot's random weights
    need exploration."""

    robot: Literal["toy", "libero"] = "toy"
    """Tasks of the robot. toy: the reaching task, from random weights; libero: the tasks of
    srpo_libero, from the policy that ships."""

    libero_optimizer: OptimizerConfig = OptimizerConfig(lr=3e-4, warmup_steps=12)
    """Optimizer of the robot on LIBERO."""

    driving_optimizer: OptimizerConfig = OptimizerConfig(lr=2e-4, warmup_steps=10)
    """Optimizer of the driver."""

    policy: str = str(grpo_text.ARITHMETIC_BASE)
    """Folder (such as `sft_text` writes) or hub id of the language policy to start from."""

    num_operators: int = 2
    """Operations in a sum."""

    num_digits: int = 1
    """Digits of each number in a sum."""

    robot_share: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.5
    """Share of the groups that are the robot's."""

    driving_share: NonNegativeFloat = 0.0
    """Share of the groups that are the driver's. 0: no driver."""

    num_starts: Annotated[int, msgspec.Meta(ge=3)] = 4096
    """Number of starts in an epoch, of all kinds together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            self.driving_share < 1.0 - self.robot_share,
            "driving_share",
            "less than what robot_share leaves, so that all kinds are run",
        )


def solved_or_scored(trajectory: Trajectory) -> Reward:
    """Return the score of a drive, and 1 or 0 for a task that was or was not solved."""
    # a drive has a score between 0 and 1; success alone would say the same of most of them
    is_drive = trajectory.episode.env.id == DRIVING
    return environment(trajectory) if is_drive else success(trajectory)


def mixed_agent(limits: ChatLimits) -> Agent:
    """Return an agent that acts in simulators with the policy "robot", on the road with "driver"
    and in text environments with "language".

    If several agents share a text environment, each acts with the policy of its name. An episode
    raises ConfigError if there is no such policy.
    """

    return partial(run_either, limits=limits)


async def run_either(env: Any, policies: Any, *, limits: ChatLimits) -> Trajectory:
    """Run one episode with the policy that it needs: see `mixed_agent`."""
    is_text = is_text_task(env.episode.env)
    # told by the environment, since the scheduler knows kinds of environments and no policies
    acting = DRIVER if env.episode.env.id == DRIVING else ROBOT
    policies = key_by_member(policies)
    is_shared = AgentNames(policies).acts_for_all
    if is_shared or not (is_text or acting in policies):
        names = "all environments" if is_shared else sorted(policies)
        raise ConfigError(
            f"{env.episode.env.id!r} needs the policy {acting!r}, but there is only one for "
            f"{names}; train a Team with the members {acting!r} and {LANGUAGE!r}"
        )
    if not is_text:
        return with_agent(await embodied_agent_within_range(env, policies[acting]), acting)
    speakers = dict(policies)
    if LANGUAGE in policies:
        # an environment with one agent does not name it
        speakers[DEFAULT_AGENT] = policies[LANGUAGE]
    return with_agent(await chat_agent(env, speakers, limits=limits), LANGUAGE)


def with_agent(trajectory: Trajectory, name: str) -> Trajectory:
    """Return the episode with `name` as the agent of decisions that have none.

    The policy of that name learns from them.
    """
    steps = tuple(
        msgspec.structs.replace(step, agent=name) if step.agent == DEFAULT_AGENT else step
        for step in trajectory.steps
    )
    return msgspec.structs.replace(trajectory, steps=steps)


def mix_starts(
    robot: Sequence[TaskStart],
    language: Sequence[TaskStart],
    robot_share: float,
    num: int,
    driving: Sequence[TaskStart] = (),
    driving_share: float = 0.0,
) -> list[TaskStart]:
    """Return `num` starts of all kinds in this proportion, at least one of each.

    Starts repeat if there are too few.
    """
    # at least one of each kind, so that no policy of the team is left without episodes
    num_driving = min(max(round(driving_share * num), 1), num - 2) if driving else 0
    num_robot = min(max(round(robot_share * num), 1), num - num_driving - 1)
    return [
        *_repeat(robot, num_robot),
        *_repeat(driving, num_driving),
        *_repeat(language, num - num_robot - num_driving),
    ]


def _repeat(starts: Sequence[TaskStart], num: int) -> list[TaskStart]:
    return [starts[number % len(starts)] for number in range(num)]


def mixed_starts(config: SideBySideConfig) -> list[TaskStart]:
    """Return starts of all kinds."""
    sums = grpo_text.GrpoTextConfig(
        run=RunConfig(seed=config.run.seed),
        num_operators=config.num_operators,
        num_digits=config.num_digits,
        num_starts=config.num_starts,
        num_validation=0,
    )
    language = grpo_text.training_starts(sums)
    is_toy = config.robot == "toy"
    robot = (
        srpo_toy.training_starts(_toy_config(config))
        if is_toy
        else libero_starts(_libero_config(config))
    )
    driving = driving_starts(_driving_config(config)) if config.driving_share else []
    return mix_starts(
        robot, language, config.robot_share, config.num_starts, driving, config.driving_share
    )


def make_team(config: SideBySideConfig) -> "Team":
    """Make the team of all policies; each learns in every update from its own groups."""
    if config.robot == "toy":
        robot = vla_rl.Member(srpo_toy.new_policy(_toy_config(config)))
    else:
        learner = _learner_config(config, config.libero_optimizer)
        robot = vla_rl.Member(starting_policy(_libero_config(config)), learner=learner)
    speaker = vla_rl.Member(
        language.load_language_model(config.policy),
        learner=_learner_config(config, config.language_optimizer, config.language_entropy_coef),
    )
    members = {ROBOT: robot, LANGUAGE: speaker}
    if config.driving_share:
        policy = load_policy(
            _driving_config(config).policy, CheckpointFormat(cameras=("image",)), config.run.device
        )
        learner = _learner_config(config, config.driving_optimizer)
        members[DRIVER] = vla_rl.Member(policy, learner=learner)
    return vla_rl.Team(members)


def _learner_config(
    config: SideBySideConfig, optimizer: OptimizerConfig, entropy_coef: float = 0.0
) -> LearnerConfig:
    return msgspec.structs.replace(config.learner, optimizer=optimizer, entropy_coef=entropy_coef)


def _libero_config(config: SideBySideConfig) -> SrpoLiberoConfig:
    return SrpoLiberoConfig(run=config.run)


def _driving_config(config: SideBySideConfig) -> DrivingConfig:
    return DrivingConfig(run=config.run)


def _toy_config(config: SideBySideConfig) -> srpo_toy.SrpoToyConfig:
    return srpo_toy.SrpoToyConfig(run=config.run)


async def main(command: Command[TrainingLaunch, SideBySideConfig]) -> int:
    """Plan, draw or train, as the command line says."""
    config = command.config
    kinds = [config.robot, "text", *(["driving"] if config.driving_share else [])]
    footprint = EpisodeFootprint(
        what_runs=f"one environment of {', '.join(kinds)}",
        # the largest, because any simulator may have to run any robot's start
        simulator_mb=max(SIMULATOR_MB[kind] for kind in kinds),
        server_mb=60,
        chunk_bytes=4096,
        num_chunks=config.chat.max_turns,
    )
    return await launch(
        command, mixed_starts(config), make_team(config), footprint, agent=mixed_agent(config.chat)
    )


cli = partial(run_recipe, TrainingLaunch, SideBySideConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
