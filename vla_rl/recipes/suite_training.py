"""Settings and steps that all training recipes on a benchmark's suites share: tasks, base policy,
held-out episodes, training.

The recipes for Meta-World are this with tasks of their own; those for LIBERO are in
`libero_training`.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import msgspec

from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.launch import launch
from vla_rl.cli.memory_plan import EpisodeFootprint
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.image_env import NUM_STARTS
from vla_rl.errors import ConfigError
from vla_rl.evaluation import (
    HeldOutEvaluator,
    embodied_agent_within_range,
    libero_episode,
    parse_numbers,
    parse_tasks,
    write_contact_sheet,
)
from vla_rl.evaluation.conditions import POLICY_DIGEST
from vla_rl.evaluation.held_out_schedule import choosing_numbers, number_ranges
from vla_rl.evaluation.scenes import (
    ImageSize,
    LiberoQuality,
    Scene,
    StepLimit,
    note_training_images,
)
from vla_rl.evaluation.suites import (
    Benchmark,
    SuiteTask,
    describe_suites,
    get_benchmark,
    require_fitting,
)
from vla_rl.models.families import require_method
from vla_rl.models.loading import CheckpointFormat, compute_digest_as_read, load_policy
from vla_rl.pipelines.config import EmbodiedConfig
from vla_rl.recipes.held_out_starts import HeldOutStarts
from vla_rl.recipes.trainable_policy import (
    TrainedPart,
    add_adapters,
    choose_trained_part,
    require_trainable,
)
from vla_rl.rollout import TaskStart
from vla_rl.types import (
    Agent,
    EnvSpec,
    EpisodeSpec,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    derive_seed,
)

if TYPE_CHECKING:
    from vla_rl.models.robot_policy import RobotPolicy


MAX_TRAINED: Final = 100_000
"""Maximum of `train_init_states`; a larger number is probably a typing mistake."""


class SuiteTrainingConfig(EmbodiedConfig, frozen=True, kw_only=True):
    """Reinforcement learning on tasks of a benchmark's suites."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (ReadIf(("lora_alpha", "lora_targets"), "lora_rank"),)

    benchmark: ClassVar[Benchmark]
    """The benchmark of the tasks."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature for rollout and training. Higher explores further from the
    greedy action, which evaluation uses."""

    tasks: tuple[str, ...]
    """Suites of the benchmark, or some of a suite's tasks by its numbers, such as
    libero_goal/0-3,7."""

    train_init_states: Annotated[int, msgspec.Meta(ge=1, le=MAX_TRAINED)] = 40
    """Number of starts of each task to train on, from the first on; the rest stay unseen. Starts
    are the task's fixed ones, and beyond them drawn ones."""

    step_limit: StepLimit | None = None
    """None: 160 for the shipped policy, whose successes take about half as many, else each suite's
    published limit."""

    image_size: ImageSize | None = None
    """None: the side that the checkpoint says it was trained with (84 for the shipped policy and for what is
    trained from it), its own for a flow policy that sees one size alone, else 256, as published policies were
    trained."""

    quality: LiberoQuality | None = None
    """None: the quality that the checkpoint says it was trained with (fast for the shipped policy and for what is
    trained from it), else exact."""

    policy: str
    """Folder or hub id of the checkpoint to start from, of any family."""

    policy_format: CheckpointFormat = CheckpointFormat()
    train: TrainedPart = "all"
    """Part of a flow policy that is trained: all, or the expert alone with the projections of actions; what
    the prefix reads (images, prompt, often the state) is frozen then. Others are trained whole, or by adapters."""

    lora_rank: PositiveInt | None = None
    """Rank of new LoRA adapters that are trained instead of the weights, such as 32. None: no new
    adapters."""

    lora_alpha: int = 16
    """Scale of the adapters, which are weighted by alpha / rank."""

    lora_targets: Literal["hidden", "all-linear"] = "hidden"
    """Layers that get an adapter. hidden: every linear layer but the output head, of a flow policy's trained
    part; all-linear: also the output head and the patch convolutions, as OpenVLA is fine-tuned."""

    recompute_activations: bool = False
    """Recompute the policy's activations in the backward pass instead of storing them: less memory,
    more computation."""

    compile_blocks: bool = False
    """Compile the policy's blocks by torch.compile, for acting and training: faster on a GPU. The
    first calls of each kind take about 10 s more there, and minutes on a CPU."""

    held_out: HeldOutStarts = HeldOutStarts()

    simulators: SimulatorConfig = SimulatorConfig(
        num_envs=2 * (os.cpu_count() or 1), rss_limit_mb=4000
    )
    """Simulator processes; two for each core by default, because half of them wait for the
    policy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_one_choice = self.lora_rank is None or self.policy_format.adapter_use != "train"
        self.require(
            is_one_choice,
            "lora_rank",
            "none with policy_format.adapter_use train: either trains an adapter",
        )
        self.require(len(self.chosen_tasks) > 0, "tasks", "at least one task")
        for task in self.chosen_tasks:
            self.require(
                get_benchmark(task.suite) is self.benchmark,
                "tasks",
                f"tasks of {describe_suites(self.benchmark, task.suite)}",
            )
        # made once to be checked: a start that is trained on must be refused before an hour of
        # training
        held_out_episodes(self)
        choosing_episodes(self)

    @property
    def chosen_tasks(self) -> tuple[SuiteTask, ...]:
        """Tasks that `tasks` names."""
        return parse_tasks(self.tasks, "tasks")

    @property
    def scene(self) -> Scene:
        """Conditions of the training episodes."""
        raise NotImplementedError

    @property
    def policy_folder(self) -> str:
        """Folder or hub id of the checkpoint that `policy` names."""
        return self.policy

    @property
    def held_out_scene(self) -> Scene:
        """Conditions of the held-out episodes: those of an evaluation, with the same images."""
        raise NotImplementedError

    @property
    def split_in_words(self) -> str:
        """How held-out episodes differ from those of training, besides their starts."""
        return ""

    def load_starting_policy(self) -> "RobotPolicy":
        """Load the policy to train. Raises: ConfigError, CheckpointError."""
        return starting_policy(self)

    def make_training_env(self, task: SuiteTask) -> EnvSpec:
        """Return the environment of a task's training episodes."""
        return self.scene.make_env_spec(task.suite, task.task_id)

    def held_out_envs(self, task: SuiteTask) -> Sequence[EnvSpec]:
        """Return the environments in which each held-out start of a task is run."""
        return [self.held_out_scene.make_env_spec(task.suite, task.task_id)]


def held_out_episodes(config: SuiteTrainingConfig) -> list[EpisodeSpec]:
    """Return every task from every held-out start, once.

    Raises: ConfigError if a start is trained on or does not exist.
    """
    return _greedy_episodes(
        config, {task: _report_numbers(config, task) for task in config.chosen_tasks}
    )


def choosing_episodes(config: SuiteTrainingConfig) -> list[EpisodeSpec]:
    """Return every task from every start that chooses the best checkpoint, once; none without
    evaluations beside training.

    Raises: ConfigError if a start is reported, trained on or does not exist.
    """
    if config.held_out.every is None:
        return []
    return _greedy_episodes(
        config, {task: _choose_numbers(config, task) for task in config.chosen_tasks}
    )


def _report_numbers(config: SuiteTrainingConfig, task: SuiteTask) -> tuple[int, ...]:
    wanted = config.held_out.init_states
    if wanted is None:
        return ()
    states = parse_numbers(wanted, task.num_init_states, "held_out.init_states", limit=NUM_STARTS)
    # a result on starts that were trained on would look like progress on new ones
    if min(states) < config.train_init_states:
        raise ConfigError(
            f"held_out.init_states are {wanted!r}, but the first {config.train_init_states} are "
            f"trained on; expected numbers from {config.train_init_states} on"
        )
    return states


def _choose_numbers(config: SuiteTrainingConfig, task: SuiteTask) -> tuple[int, ...]:
    reported = _report_numbers(config, task)
    if not reported:
        return ()
    return choosing_numbers(
        config.held_out.choose_init_states,
        reported,
        range(config.train_init_states),
        task.num_init_states,
        limit=NUM_STARTS,
    )


def _greedy_episodes(
    config: SuiteTrainingConfig, states_of: Mapping[SuiteTask, Sequence[int]]
) -> list[EpisodeSpec]:
    """Return a greedy episode of each task from each of its starts, in each environment."""
    # greedy, as published success rates are; what training samples is reported as
    # rollout/success_rate
    sampling = config.held_out.sampling(config.temperature)
    cases = [
        (env, task, state)
        for task, states in states_of.items()
        for env in config.held_out_envs(task)
        for state in states
    ]
    return [
        libero_episode(env, number, task.key, state, sampling=sampling, seed=config.run.seed)
        for number, (env, task, state) in enumerate(cases)
    ]


def training_starts(config: SuiteTrainingConfig) -> list[TaskStart]:
    """Return every task from every initial state that is trained on."""
    starts = []
    for task in config.chosen_tasks:
        env = config.make_training_env(task)
        starts += [
            TaskStart(env=env, task=task.key, options={"init_state_id": state})
            for state in range(config.train_init_states)
        ]
    return starts


def starting_policy(config: SuiteTrainingConfig) -> "RobotPolicy":
    """Load the policy to train.

    Raises: ConfigError if it gives no likelihood of its actions; CheckpointError.
    """
    folder = config.policy_folder
    policy = load_policy(folder, config.policy_format, config.run.device)
    require_fitting(policy, folder, config.benchmark, config.scene.image_size)
    require_trainable(policy, folder, config.learner)
    choose_trained_part(policy, config.train)
    if config.lora_rank is not None:
        from vla_rl.models.prismatic.config import LoraConfig

        lora = LoraConfig(
            rank=config.lora_rank, alpha=config.lora_alpha, targets=config.lora_targets
        )
        # a seed of the run: two runs with different seeds must not begin with the same adapters
        policy = add_adapters(policy, lora, derive_seed(config.run.seed, "adapters"))
    if config.recompute_activations:
        require_method(policy, "recompute_activations", "recompute_activations")()
    if config.compile_blocks:
        from vla_rl.models.blocks import COMPILATION_NOTICE

        require_method(policy, "compile_blocks", "compile_blocks")()
        print(COMPILATION_NOTICE, flush=True)
    note_training_images(policy, config.scene)
    return policy


async def main(
    command: Command[TrainingLaunch, SuiteTrainingConfig],
    scene_facts: Mapping[str, str] = MappingProxyType({}),
    agent: Agent = embodied_agent_within_range,
) -> int:
    """Plan, draw or train, as the command line says.

    Args:
        scene_facts: what results depend on besides the configuration, for `about.json`.
        agent: runs the training episodes; held-out ones are the policy's own.
    """
    config = command.config
    about = {"tasks": " ".join(config.tasks), "quality": config.scene.quality, **scene_facts}
    held_out = held_out_episodes(config)
    print(_describe_split(config), flush=True)
    model = await asyncio.to_thread(config.load_starting_policy)
    # in a thread, because it reads gigabytes of weights
    about[POLICY_DIGEST] = await asyncio.to_thread(
        compute_digest_as_read, config.policy_folder, config.policy_format
    )
    print(
        f"starting from the policy in {config.policy_folder}; rendering quality {config.scene.quality}",
        flush=True,
    )
    print(model.describe(), flush=True)
    return await launch(
        command,
        training_starts(config),
        model,
        EpisodeFootprint(
            what_runs=" ".join(config.tasks),
            simulator_mb=config.benchmark.simulator_mb,
            server_mb=config.benchmark.server_mb,
            # both cameras, and the state, the tokens and their log-probs
            chunk_bytes=2 * 3 * config.scene.image_size**2 + 2048,
            num_chunks=-(-_longest_episode(config) // model.config.chunk_size),
            # a chunk is one decision, and its control steps run without another
            decision_s=model.config.chunk_size * config.benchmark.step_s,
        ),
        about,
        HeldOutEvaluator(
            held_out,
            contact_sheet=write_contact_sheet,
            choose=choosing_episodes(config),
            assets=about.get("assets", ""),
            schedule=config.held_out,
            policy_digest=about[POLICY_DIGEST],
        )
        if held_out
        else None,
        agent,
    )


def _longest_episode(config: SuiteTrainingConfig) -> int:
    published = max(config.benchmark.step_limit_of(task.suite) for task in config.chosen_tasks)
    trained = config.scene.step_limit or published
    return (
        trained
        if config.held_out.init_states is None
        else max(trained, config.held_out.step_limit or published)
    )


def _describe_split(config: SuiteTrainingConfig) -> str:
    wanted = config.held_out
    trained = (
        f"training starts from numbers 0-{config.train_init_states - 1} of each task, up to "
        f"{_describe_limit(config.scene.step_limit)}"
    )
    if wanted.init_states is None:
        return f"{trained}; no held-out episodes (--held-out.init-states 40-49 adds some)"
    return (
        f"{trained}; held out are {wanted.init_states}{config.split_in_words}, up to "
        f"{_describe_limit(wanted.step_limit)}{_describe_choosing(config)}"
    )


def _describe_choosing(config: SuiteTrainingConfig) -> str:
    if config.held_out.every is None:
        return ""
    texts = dict.fromkeys(
        number_ranges(_choose_numbers(config, task)) for task in config.chosen_tasks
    )
    return f"; the best checkpoint is chosen by {' and '.join(texts)}"


def _describe_limit(step_limit: int | None) -> str:
    return "the suites' limits" if step_limit is None else f"{step_limit} control steps"
