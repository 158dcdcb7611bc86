"""A planner and the robot that it calls learn in one run: `python -m vla_rl.recipes.grpo_planner`.

    request ─► planner ─► do("put the bowl on the plate", 120) ─► robot in LIBERO ─► scene in words ─► planner ...

An episode is one request of two or three skills in the scene of libero_goal, such as "light the burner, but
first open the drawer between the other two"; success is the simulator's. The planner is compared by turns,
the robot by its calls (`--advantage.name hierarchical_rloo`):

    --learns both                       both policies learn in every update
    --learns planner, --learns robot    one learns, the other keeps its weights
    --advantage.name grpo               one advantage for all decisions of an agent in an episode
    --planner-policy smollm2            a public language model (`vla-rl install smollm2`)
    --planner-policy new                a small one with random weights
    --requests my_requests.jsonl        requests of your own; --validation-requests: held-out ones

Held-out requests, in other words and of other combinations of skills, are run before the first update and
after the last. There, and where it does not learn, the robot acts by the means of its tokens, if it has means.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import msgspec
from msgspec.structs import replace

import vla_rl
from vla_rl.algorithms import AdvantageConfig
from vla_rl.algorithms.losses import PolicyLossConfig
from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.launch import launch, run_recipe
from vla_rl.cli.memory_plan import EpisodeFootprint
from vla_rl.datasets.prompts import read_prompts
from vla_rl.engines import EngineConfig
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.libero.request_env import check_request, list_skills
from vla_rl.envs.libero.requests import Request, Split, draw_requests
from vla_rl.envs.libero.tasks import find_task
from vla_rl.errors import ConfigError
from vla_rl.evaluation.scenes import (
    ImageSize,
    LiberoAssets,
    LiberoQuality,
    LiberoScene,
    Physics,
    StepLimit,
    assets_in_use,
    describe_other_images,
    note_training_images,
    resolve_checkpoint,
)
from vla_rl.evaluation.suites import LIBERO
from vla_rl.evaluation.validation import Validation
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.models import language
from vla_rl.models.families import has_token_means, require_token_means
from vla_rl.models.loading import CheckpointFormat, load_policy
from vla_rl.models.shipped import GOAL_PLANNER, SHIPPED, SHIPPED_GOAL
from vla_rl.pipelines.config import PlannerTrainingConfig, RunConfig
from vla_rl.pipelines.nodes.rewards import RewardConfig
from vla_rl.recipes.request_plans import SCENE_TASK, SUITE
from vla_rl.recipes.trainable_policy import require_trainable
from vla_rl.rollout import PlannerConfig, SchedulerConfig, TaskStart, planner_agent
from vla_rl.rollout.planner_agent import DO, FINISH, MANUAL, PLANNER, ROBOT
from vla_rl.types import EnvSpec, NonNegativeInt, PositiveInt, ReadIf, Sampling, derive_seed
from vla_rl.util.values import excerpt

if TYPE_CHECKING:
    from vla_rl.engines import LanguageModel
    from vla_rl.team.members import Team


ENV_ID: Final = "vla_rl/libero_request-v0"
NEW: Final = "new"
NUM_STARTS: Final = 40
"""Starts of training; held-out requests have the next ten."""


class GrpoPlannerConfig(PlannerTrainingConfig, frozen=True, kw_only=True):
    """Reinforcement learning of a planner and a robot."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (
        ReadIf(("planner_optimizer",), "learns", ("both", "planner")),
        ReadIf(("num_requests",), "requests", (None,)),
        ReadIf(("num_validation",), "validation_requests", (None,)),
    )

    run: RunConfig = RunConfig(name="grpo_planner", updates=24, checkpoint_every=8)
    pipeline: str = "embodied_grpo"
    group_size: PositiveInt = 8
    reward: RewardConfig = RewardConfig(function="environment")
    advantage: AdvantageConfig = AdvantageConfig(name="hierarchical_rloo")
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=4, max_staleness=1)
    simulators: SimulatorConfig = SimulatorConfig(num_envs=8, rss_limit_mb=4000)
    engine: EngineConfig = EngineConfig(max_batch=16, kept_conversations=32, max_reply=160)
    planner: PlannerConfig = PlannerConfig(max_turns=8, max_call_steps=150, max_reply=160)
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=3e-4, warmup_steps=4),
        loss=PolicyLossConfig(clip_low=0.2, clip_high=0.28),
        minibatch_trajectories=8,
        micro_batch_tokens=8192,
    )
    """Learner of both policies; `planner_optimizer` replaces its optimizer for the planner."""

    planner_optimizer: OptimizerConfig = OptimizerConfig(lr=1e-4, warmup_steps=4)
    """Optimizer of the planner. Its rate is for the small planners of this package; for another one it is 1.5e-5,
    unless it is set."""

    learns: Literal["both", "planner", "robot"] = "both"
    """Policies that learn; the other one keeps its weights."""

    policy: str = SHIPPED_GOAL
    """Checkpoint of the robot's policy, as in `srpo_libero`. shipped_goal: the one of this package that was trained on
    all ten tasks of the scene."""

    planner_policy: str = SHIPPED
    """Folder or hub id of the planner's language model. shipped: the small one of this package, to which `sft_text
    --task requests` has shown plans with mistakes. new: a small one with random weights."""

    requests: str | None = None
    """File of requests to train on, .jsonl or .parquet, with the fields of `Request`. None: drawn ones."""

    num_requests: PositiveInt = 256
    """Number of drawn requests to train on."""

    validation_requests: str | None = None
    """File of held-out requests for the validation, with the fields of `Request`. None: drawn ones."""

    num_validation: NonNegativeInt = 20
    """Held-out requests of each kind, wordings and combinations, for the validation before the first update
    and after the last. 0: none."""

    step_limit: StepLimit = 600
    image_size: ImageSize | None = None
    quality: LiberoQuality | None = None
    physics: Physics = "fast"
    assets: LiberoAssets = None

    @classmethod
    def task_settings(cls, pipeline: str) -> Mapping[str, Any]:
        """Keep reward and credit with another pipeline that has no critic."""
        if pipeline in ("ppo", "embodied_ppo"):
            return {}
        return {
            "reward": {"function": "environment"},
            "advantage": {"name": "hierarchical_rloo"},
        }

    def unused_options(self) -> Mapping[str, str]:
        """Return also the robot's optimizer if the robot does not learn."""
        found = dict(super().unused_options())
        if self.learns == "planner":
            found["learner.optimizer"] = "learns is 'planner', which has planner_optimizer"
        return found

    @property
    def scene(self) -> LiberoScene:
        """Conditions of the episodes."""
        return LiberoScene.from_options(self, self.policy, self.step_limit)


def read_requests(file: str) -> list[Request]:
    """Return the requests of a file.

    Raises: DataError for a file that cannot be read; ConfigError naming the row of a request that is none,
        or whose goals cannot hold in the scene.
    """
    found = []
    for number, row in enumerate(read_prompts(file, ("request", "goals"))):
        try:
            request = msgspec.convert(row, Request)
            if not request.request.strip():
                raise ValueError("the request has no words, expected what the planner is asked for")
            check_request(find_task(SUITE, SCENE_TASK), request.goals, request.forbidden)
        except (msgspec.ValidationError, ValueError) as error:
            raise ConfigError(f"{file}: row {number}: {error}") from error
        found.append(request)
    return found


def make_starts(
    config: GrpoPlannerConfig, requests: Sequence[Request], init_states: range
) -> list[TaskStart]:
    """Return each request from one of the starts, by turns."""
    return [
        TaskStart(
            env=EnvSpec(
                id=ENV_ID,
                kwargs={
                    "suite": SUITE,
                    "task_id": SCENE_TASK,
                    "request": request.request,
                    "goals": list(request.goals),
                    "forbidden": list(request.forbidden),
                    "in_order": request.in_order,
                    **config.scene.kwargs,
                },
            ),
            task=request.task,
            options={"init_state_id": init_states[number % len(init_states)]},
        )
        for number, request in enumerate(requests)
    ]


def training_starts(config: GrpoPlannerConfig) -> list[TaskStart]:
    """Return the requests to train on, from the starts to train on. Raises: as `read_requests`."""
    if config.requests is None:
        requests = draw_requests("train", config.num_requests, config.run.seed)
    else:
        requests = read_requests(config.requests)
    return make_starts(config, requests, range(NUM_STARTS))


def validation_starts(config: GrpoPlannerConfig) -> list[TaskStart]:
    """Return held-out requests from held-out starts. Raises: as `read_requests`."""
    splits: tuple[Split, ...] = ("wordings", "combinations")
    if config.validation_requests is None:
        requests = [
            each for split in splits for each in draw_requests(split, config.num_validation)
        ]
    else:
        requests = read_requests(config.validation_requests)
    return make_starts(config, requests, range(NUM_STARTS, NUM_STARTS + 10))


def one_env_of_each_scene(starts: Sequence[TaskStart]) -> list[EnvSpec]:
    """Return an environment of each scene that the requests are asked in, with the predicates of all of them as its
    goals: it opens for all of them or for none.
    """
    scenes: dict[bytes, dict[str, Any]] = {}
    for start in starts:
        kwargs = dict(start.env.kwargs)
        request = {name: kwargs.pop(name) for name in Request.__struct_fields__ if name in kwargs}
        key = msgspec.json.encode(kwargs, order="deterministic")
        scene = scenes.setdefault(key, {**kwargs, "request": request["request"], "goals": []})
        asked = (*request["goals"], *request["forbidden"])
        scene["goals"] += [goal for goal in dict.fromkeys(asked) if goal not in scene["goals"]]
    return [EnvSpec(id=ENV_ID, kwargs=scene) for scene in scenes.values()]


def training_agent(config: GrpoPlannerConfig, robot: Any) -> "partial[Any]":
    """Return the agent of training. A robot that does not learn acts by the means of its tokens, if it has means.

    Raises: ConfigError if means are wanted of a robot that learns, or that has none.
    """
    by_mean = config.planner.robot_by_mean
    if by_mean:
        if config.learns != "planner":
            raise ConfigError(
                f"planner.robot_by_mean is True, but learns is {config.learns!r}: a robot learns from samples; "
                "expected False, or --learns planner"
            )
        require_token_means(robot, "planner.robot_by_mean", "--planner.robot-by-mean False")
    if by_mean is None:
        by_mean = config.learns == "planner" and has_token_means(robot)
    return partial(planner_agent, planner=replace(config.planner, robot_by_mean=by_mean))


def validation_agent(config: GrpoPlannerConfig, robot: Any) -> "partial[Any]":
    """Return the agent of the validation, whose robot acts by the means of its tokens, if it has means."""
    by_mean = config.planner.robot_by_mean is not False and has_token_means(robot)
    return partial(planner_agent, planner=replace(config.planner, robot_by_mean=by_mean))


def make_validation(config: GrpoPlannerConfig, robot: Any) -> Validation | None:
    """Return the validation of the run; None without held-out requests."""
    starts = validation_starts(config)
    if not starts:
        return None
    agent = validation_agent(config, robot)
    sampling = Sampling(temperature=config.temperature)
    return Validation(starts, 1, agent, sampling)


def make_planner(config: GrpoPlannerConfig) -> "LanguageModel[Any]":
    """Load the planner, or make a new one whose tokenizer knows the words of requests and skills."""
    if config.planner_policy != NEW:
        is_shipped = config.planner_policy == SHIPPED
        return language.load_language_model(
            str(GOAL_PLANNER) if is_shipped else config.planner_policy
        )
    skills = list_skills(find_task(SUITE, SCENE_TASK))
    texts = [MANUAL, DO, FINISH, *skills, *(each.request for each in draw_requests("train", 200))]
    shape = language.TinyConfig(context_size=4096, vocab_size=1024)
    return language.tiny(shape, texts, derive_seed(config.run.seed, "planner"))


def make_team(config: GrpoPlannerConfig) -> "Team":
    """Make the team of the planner and the robot."""
    folder = resolve_checkpoint(config.policy, config.assets)
    robot = load_policy(folder, CheckpointFormat(), config.run.device)
    require_trainable(robot, folder, config.learner)
    note_training_images(robot, config.scene)
    learner = replace(config.learner, optimizer=config.planner_optimizer)
    members = {
        PLANNER: vla_rl.Member(make_planner(config), learner=learner),
        ROBOT: vla_rl.Member(robot),
    }
    return vla_rl.Team(members, learning=None if config.learns == "both" else (config.learns,))


def find_other_images(config: GrpoPlannerConfig) -> str | None:
    """Return one line if the robot's policy will see other images than it was trained on, such as `shipped_goal` on
    placeholder assets.
    """
    folder, source = (
        resolve_checkpoint(config.policy, config.assets),
        assets_in_use(config.assets).source,
    )
    return describe_other_images(folder, source, config.scene.image_size, config.scene.quality)


async def main(command: Command[TrainingLaunch, GrpoPlannerConfig]) -> int:
    """Plan, draw or train, as the command line says."""
    config = command.config
    starts = training_starts(config)
    # a drawing needs no assets
    if not command.launch.draw and (warning := find_other_images(config)) is not None:
        print(warning, flush=True)
    print(f"{len(starts)} requests, such as {excerpt(starts[0].env.kwargs['request'])}", flush=True)
    team = make_team(config)
    robot = team.members[ROBOT].model
    agent = training_agent(config, robot)
    if agent.keywords["planner"].robot_by_mean:
        print("the robot acts by the means of its tokens, because it does not learn", flush=True)
    return await launch(
        command,
        starts,
        team,
        EpisodeFootprint(
            what_runs=ENV_ID,
            simulator_mb=LIBERO.simulator_mb,
            server_mb=LIBERO.server_mb,
            chunk_bytes=2 * 3 * config.scene.image_size**2 + 2048,
            num_chunks=config.step_limit // 4,
        ),
        evaluator=make_validation(config, robot),
        agent=agent,
        rehearsed_envs=one_env_of_each_scene([*starts, *validation_starts(config)]),
    )


cli = partial(run_recipe, TrainingLaunch, GrpoPlannerConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
