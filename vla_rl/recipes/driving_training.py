"""Settings and steps of reinforcement learning on scenes of one decision: base policy, training
and held-out scenes, training.

`grpo_driving`, `srpo_driving` and `grpo_navsim` are this with their scenes, pipeline and length;
`srpo_driving_loop` trains whole drives by `train_driver`.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import msgspec

from vla_rl.algorithms import AdvantageConfig
from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.launch import launch
from vla_rl.cli.memory_plan import EpisodeFootprint
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.driving.observing import ROUTE_POINTS, STATE_SIZE
from vla_rl.envs.driving.plan_actions import NUM_WAYPOINTS, PlanAction
from vla_rl.envs.driving.scores import Version
from vla_rl.envs.driving.scores.pdm import parse_reward
from vla_rl.errors import ConfigError
from vla_rl.evaluation import embodied_agent_within_range
from vla_rl.evaluation.conditions import POLICY_DIGEST
from vla_rl.evaluation.drive_sheets import write_drive_sheet
from vla_rl.evaluation.held_out import ContactSheetWriter, HeldOutEvaluator
from vla_rl.evaluation.held_out_schedule import HeldOutDecoding
from vla_rl.evaluation.records import SCORES
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.models.families import find_family
from vla_rl.models.loading import (
    CheckpointFormat,
    Device,
    compute_digest_as_read,
    load_policy,
)
from vla_rl.models.shipped import ASSETS
from vla_rl.pipelines.config import EmbodiedConfig
from vla_rl.pipelines.nodes.rewards import RewardConfig
from vla_rl.recipes.trainable_policy import require_trainable
from vla_rl.rollout import SchedulerConfig, TaskStart
from vla_rl.types import (
    EnvSpec,
    EpisodeSpec,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    derive_seed,
)

if TYPE_CHECKING:
    from vla_rl.models.robot_policy import RobotPolicy


ConfigT = TypeVar("ConfigT", bound=EmbodiedConfig)

PLAN_WIDTH: Final = 3
"""Numbers of a plan's row."""

ROWS_BY_STATISTICS: Final[Mapping[str, PlanAction]] = {
    "default": "moves",
    "profiles": "profiles",
    "along_route": "along_route",
}
"""Meaning of a policy's rows by the name of its action statistics, as `sft_driving` saves it."""

BY_GROUP_MEAN: Final = AdvantageConfig(name="dr_grpo")
"""Advantage of graded trajectories. `grpo` divides by the group's standard deviation, which makes a
difference of 0.01 between good trajectories weigh as much as one between good and bad; with it
the mean score of sampled trajectories fell."""


def score_settings(pipeline: str) -> Mapping[str, Any]:
    """Return what tasks with a score as the reward need of a pipeline."""
    by_group_mean = {"advantage": {"name": BY_GROUP_MEAN.name}}
    if pipeline == "embodied_srpo":
        return by_group_mean  # it makes its own reward
    # the pipelines' default, 1 for a success, would hide the score
    rewarded = {"reward": {"function": "environment"}}
    return {**rewarded, **by_group_mean} if pipeline == "embodied_grpo" else rewarded


DRIVING: Final = "vla_rl/driving-v0"
DRIVING_BASE: Final = ASSETS / "driving_base"
"""A small policy that half learnt to drive by moves, without a route; `sft_driving` makes it."""

ROUTE_BASE: Final = ASSETS / "driving_route_base"
"""A small policy that races along the route, reads ten points of it, and has 32 action tokens; it is
made by `sft_driving` with the defaults."""

IMAGE_SIZE: Final = 112
"""Side of the images in pixels."""

CROP: Final = (0.35, 0.75)
"""Part of the front camera's height that the policy sees. Without it, one row of patches has the
whole road that is more than 8 m ahead."""

ENVS_A_PROCESS: Final = 8
"""Environments of a process: as many as members of a group, so that the policy gets whole batches.
They run one at a time."""

MOST_PROCESSES: Final = 8

FORMAT: Final = CheckpointFormat(cameras=("image",))
"""How checkpoints of driving policies are read."""


class HeldOutScenesConfig(HeldOutDecoding, frozen=True, kw_only=True):
    """Scenes of the held-out split, driven greedily before the first update and after the last, and
    beside training every few updates if wanted.
    """

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (
        ReadIf((), "scenes"),
        ReadIf(("choose_scenes",), "every"),
    )

    scenes: NonNegativeInt = 500
    """Number of scenes that are reported, from number 0 on. 0: no held-out scenes."""

    choose_scenes: PositiveInt | None = None
    """Number of the scenes after them, which choose the best checkpoint, with `every`. None: as
    many."""

    mean_temperature: PositiveFloat | None = None
    """Temperature of the distributions whose means are taken. None: the recipe's `temperature`, as which the
    driving policies were measured."""

    @property
    def num_choosing(self) -> int:
        """Number of scenes that choose the best checkpoint."""
        if self.every is None:
            return 0
        return self.scenes if self.choose_scenes is None else self.choose_scenes


class SceneTrainingConfig(EmbodiedConfig, frozen=True, kw_only=True):
    """Reinforcement learning on scenes of one decision; the defaults are for the small shipped
    policy.
    """

    group_size: PositiveInt = 8
    temperature: PositiveFloat = 0.4
    """Sampling temperature for rollout and training. Higher explores further from the
    greedy trajectory, which the held-out scenes use."""

    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=16, max_staleness=1)
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=2e-4, warmup_steps=10), minibatch_trajectories=64
    )
    reward: RewardConfig = RewardConfig(function="environment")

    version: Version = "epdms_v2"
    """Version of the score that trajectories are graded by. On the driving world, the held-out scenes
    report the other one's total too."""

    reward_of: str = "total"
    """Reward of a trajectory: total, one sub-score, such as ego_progress, or several with weights,
    such as ego_progress=5,time_to_collision_within_bound=5. The held-out scenes report all of
    them either way."""

    action: PlanAction = "moves"
    """Meaning of the policy's 8 rows of 3 numbers, as in its training: `moves` from waypoint to
    waypoint, `profiles`, or `along_route`."""

    policy: str = str(DRIVING_BASE)
    """Folder of the checkpoint to start from, of any family with a likelihood: OpenVLA-OFT, or a flow policy."""

    held_out: HeldOutScenesConfig = HeldOutScenesConfig()

    simulators: SimulatorConfig = SimulatorConfig(
        num_envs=ENVS_A_PROCESS * min(os.cpu_count() or 1, MOST_PROCESSES),
        envs_per_process=ENVS_A_PROCESS,
    )
    """Environments that read or draw scenes, and grade; by default eight in a process, which draws a
    scene once for all of them, and a process for each of the first eight cores."""

    @classmethod
    def task_settings(cls, pipeline: str) -> Mapping[str, Any]:
        """Return what the task needs of this pipeline."""
        return score_settings(pipeline)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            parse_reward(self.reward_of, self.version)
        except ValueError as error:
            raise ConfigError(f"reward_of is {self.reward_of!r}: {error}") from error

    @property
    def task(self) -> str:
        """Name of the scenes in metrics and results."""
        raise NotImplementedError

    def env_of(self, split: str) -> EnvSpec:
        """Return the environment over `train` or `held_out`."""
        raise NotImplementedError

    def num_scenes(self, split: str) -> int:
        """Return the number of scenes of `train` or `held_out` that are used; of `held_out` those
        that are reported and then those that choose.
        """
        raise NotImplementedError


def training_starts(config: SceneTrainingConfig) -> list[TaskStart]:
    """Return the training scenes."""
    env = config.env_of("train")
    return [
        TaskStart(env=env, task=config.task, options={"init_state_id": number})
        for number in range(config.num_scenes("train"))
    ]


def held_out_episodes(config: SceneTrainingConfig) -> list[EpisodeSpec]:
    """Return every held-out scene, once: those that are reported, and then those that choose."""
    if config.held_out.scenes == 0:
        return []
    env = config.env_of("held_out")
    return [
        EpisodeSpec(
            episode_id=number,
            group_id=number,
            member=0,
            env=env,
            task=config.task,
            options={"init_state_id": number},
            sampling=config.held_out.sampling(config.temperature),
            seed=0,
            # a seed all the same: driving by the mean draws nothing, but an agent of one's own may
            policy_seed=derive_seed(config.run.seed, "held out", number),
        )
        for number in range(config.num_scenes("held_out"))
    ]


async def main(command: Command[TrainingLaunch, SceneTrainingConfig]) -> int:
    """Plan, draw or train, as the command line says."""
    config = command.config
    episodes, starts = held_out_episodes(config), training_starts(config)
    about = {"scenes": f"train 0-{len(starts) - 1}", "score": config.version}
    # NavSim's scenes have photographs, and no world that could be drawn from above
    contact_sheet = write_drive_sheet if starts[0].env.id == DRIVING else None
    about[POLICY_DIGEST] = await asyncio.to_thread(compute_digest_as_read, config.policy, FORMAT)
    evaluator = make_scene_evaluator(episodes, config.held_out, contact_sheet, about[POLICY_DIGEST])
    return await train_driver(command, config.policy, starts, evaluator, about)


def make_scene_evaluator(
    episodes: Sequence[EpisodeSpec],
    held_out: HeldOutScenesConfig,
    contact_sheet: ContactSheetWriter | None,
    policy_digest: str,
) -> HeldOutEvaluator:
    """Return the evaluator of held-out scenes: the first `held_out.scenes` of `episodes` are reported,
    and the others choose the best checkpoint.

    If a folder has few others, and their number is not set, half of the scenes that would be
    reported choose. Raises: ConfigError if no scene is left to choose.
    """
    # those that choose are the later ones, so that more of them change none that is reported
    report, others = episodes[: held_out.scenes], episodes[held_out.scenes :]
    choose: Sequence[EpisodeSpec] | None = others
    if held_out.every is not None and len(others) < held_out.num_choosing:
        if held_out.choose_scenes is None and len(others) < len(report) // 2:
            choose = None
        elif not others:
            raise ConfigError(
                f"held_out.scenes is {held_out.scenes}, and only {len(episodes)} held-out scenes were "
                "found, so none is left to choose the best checkpoint by; expected a smaller number"
            )
    evaluator = HeldOutEvaluator(
        report,
        contact_sheet,
        choose=choose,
        schedule=held_out,
        format=SCORES,
        policy_digest=policy_digest,
    )
    if len(evaluator.choose) < held_out.num_choosing:
        print(
            f"{len(episodes)} held-out scenes were found: {len(evaluator.episodes)} are reported, and "
            f"{len(evaluator.choose)} choose the best checkpoint",
            flush=True,
        )
    return evaluator


def load_driver(
    checkpoint: str,
    format: CheckpointFormat,
    device: Device,
    action: PlanAction,
    route_points: int | None,
) -> "RobotPolicy":
    """Load a driving policy, of any family.

    Args:
        route_points: points of the route that the state has too; None if no route is known.

    Raises: as `load_policy`; ConfigError if it gives no plan, was trained with rows that mean
    something else, or reads another number of route points.
    """
    if format.cameras == FORMAT.cameras and names_cameras(checkpoint):
        format = msgspec.structs.replace(format, cameras=None)
    model = load_policy(checkpoint, format, device)
    config = model.config
    # a policy that reads another state would take its first numbers for something else, and drive
    # somehow
    if config.state_size is not None:
        refuse_other_route(checkpoint, config.state_size, route_points)
    if config.action_dim != PLAN_WIDTH or config.chunk_size < NUM_WAYPOINTS:
        raise ConfigError(
            f"the policy in {checkpoint} gives chunks of {config.chunk_size} rows of {config.action_dim} numbers, "
            f"expected {NUM_WAYPOINTS} rows of {PLAN_WIDTH}, which are a plan; give another --policy"
        )
    # families whose statistics have a name
    trained_rows = ROWS_BY_STATISTICS.get(getattr(config, "norm_key", None) or "", action)
    if trained_rows != action:
        raise ConfigError(
            f"action is {action!r}, but the policy in {checkpoint} was trained with {trained_rows!r}: its numbers "
            f"would be read as another trajectory; set --action {trained_rows}, or give another --policy"
        )
    return model


def names_cameras(checkpoint: str) -> bool:
    """Return whether a folder's family keeps the names of its cameras in the folder, as all but OpenVLA's do."""
    from vla_rl.models.tensor_reading import locate

    return find_family(locate(checkpoint)) is not None


def refuse_other_route(checkpoint: str, state_size: int, route_points: int | None) -> None:
    """Check that a policy reads this number of route points. Raises: ConfigError."""
    # the number of points follows from the width of the state; no checkpoint names it
    read, odd = divmod(state_size - STATE_SIZE, 2)
    if odd or not 0 <= read <= ROUTE_POINTS:
        raise ConfigError(
            f"the policy in {checkpoint} reads a state of {state_size} numbers, expected {STATE_SIZE} "
            f"and x and y of 0 to {ROUTE_POINTS} points of the route; give another --policy"
        )
    if route_points is None and read > 0:
        raise ConfigError(
            f"the policy in {checkpoint} reads {read} points of the route, but these scenes come "
            "without a route; give a --policy that `sft_driving` made without --route-points"
        )
    if route_points is not None and route_points != read:
        raise ConfigError(
            f"route_points is {route_points}, but the policy in {checkpoint} reads {read} points of "
            f"the route; set --route-points {read}, or give another --policy"
        )


async def train_driver(
    command: Command[TrainingLaunch, ConfigT],
    policy: str,
    starts: Sequence[TaskStart],
    evaluator: HeldOutEvaluator,
    about: Mapping[str, str],
    num_chunks: int = 1,
) -> int:
    """Train the policy in a folder on driving scenes that grade themselves; return the exit status.

    Args:
        evaluator: runs the held-out episodes, if it has any.
        num_chunks: most decisions of an episode.
    """
    config = command.config
    seen = starts[0].env.kwargs
    model = await asyncio.to_thread(
        load_driver,
        policy,
        FORMAT,
        config.run.device,
        seen["action"],
        seen.get("route_points"),  # NavSim's scenes have none
    )
    require_trainable(model, policy, config.learner)
    print(f"starting from the policy in {policy}; {model.describe()}", flush=True)
    return await launch(
        command,
        starts,
        model,
        EpisodeFootprint(
            what_runs="driving scenes",
            simulator_mb=45,
            server_mb=60,
            chunk_bytes=3 * seen["image_size"] ** 2 + 1024,
            num_chunks=num_chunks,
        ),
        about,
        evaluator if evaluator.episodes else None,
        embodied_agent_within_range,
    )
