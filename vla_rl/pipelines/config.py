"""Configurations that all training runs share, for any task: sizes, seeds, and the run's files."""

import os
from collections.abc import Mapping
from typing import Any, Final, Literal

from vla_rl.actors import Runtime
from vla_rl.algorithms import AdvantageConfig, EmbeddingConfig, SrpoConfig, safe_policy_loss
from vla_rl.algorithms.filters import OverlongConfig, require_satisfiable
from vla_rl.algorithms.kl import KlRewardConfig
from vla_rl.cluster.config import ClusterConfig
from vla_rl.engines import EngineConfig
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.errors import ConfigError
from vla_rl.learner import CriticConfig, LearnerConfig
from vla_rl.learner.off_policy.config import OffPolicyConfig
from vla_rl.pipelines.nodes.rewards import RewardConfig
from vla_rl.replay.config import RunReplayConfig
from vla_rl.rollout import ChatLimits, PlannerConfig, SchedulerConfig
from vla_rl.types import Config, EnvPool, PositiveFloat, PositiveInt, Share
from vla_rl.util.values import FOLDER_NAME, names_folder

OF_LANGUAGE_POLICIES: Final = (
    "engine.max_context",
    "engine.max_reply",
    "engine.kept_conversations",
    "learner.micro_batch_tokens",
    "critic.micro_batch_tokens",
)


class RunConfig(Config, frozen=True, kw_only=True):
    """The length, seed, device and files of a run."""

    name: str = "run"
    """First part of the run directory's name."""

    root: str = "runs"
    """Parent folder of run directories."""

    updates: PositiveInt = 5
    """Weight updates to make, including those before a resume."""

    seed: int = 0
    """Seed of the run; all other seeds are derived from it."""

    checkpoint_every: PositiveInt = 1
    """Updates between checkpoints. The last update is always saved."""

    keep_checkpoints: PositiveInt = 2
    """Number of newest checkpoints to keep."""

    videos_every: PositiveInt = 5
    """In each window of this many updates, the first success and the first failure of every task
    become videos. Refused if the pipeline makes none: among the built-in ones, only the `embodied_`
    ones do."""

    stall_warning_s: PositiveFloat = 120.0
    """Seconds without progress after which the watchdog prints which tasks wait for which, and all
    task stacks."""

    chaos_every_s: PositiveFloat | None = None
    """Kill or freeze a random simulator, on average every this many seconds, to test that a run
    survives it. None: never."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the policy and the learner. auto: the first GPU, or the CPU with a printed note if
    there is none."""

    peak_tflops: PositiveFloat | None = None
    """Peak of the device in 10^12 floating-point operations per second, for the metrics device/mfu.
    None: that of the GPU's data sheet; no such metrics on a CPU or an unknown GPU."""

    profile_updates: str | None = None
    """Updates that torch's profiler records, such as 3-4 or 3, counted as in metrics.jsonl: a trace
    for ui.perfetto.dev in the run's folder. None: none."""

    torch_threads: PositiveInt = 1
    """Threads for the policy and the learner on a CPU. The simulators need cores too."""

    record_to: str | None = None
    """Also write every control step of all training episodes into this LeRobotDataset. Slower:
    every step is rendered."""

    wandb_project: str | None = None
    """Also log to this project of Weights & Biases (needs the extra `wandb`). None: do not."""

    def __post_init__(self) -> None:
        # The folder is made once the policy is loaded; a dry run makes none, and found no fault.
        self.require(names_folder(self.name), "name", FOLDER_NAME)
        self.require(self.profiled is not None, "profile_updates", "a range")

    @property
    def profiled(self) -> range:
        """Numbers of the updates that are profiled, from 1."""
        if self.profile_updates is None:
            return range(0)
        first, dash, last = self.profile_updates.partition("-")
        numbers = (first, last if dash else first)
        # refused here and not when the update comes: an hour may pass until then
        is_range = all(number.isdecimal() for number in numbers)
        if not is_range or not 1 <= int(numbers[0]) <= int(numbers[1]):
            self.require(False, "profile_updates", "one number from 1 on, or two such as 3-4")
        return range(int(numbers[0]), int(numbers[1]) + 1)


class FilterConfig(Config, frozen=True, kw_only=True):
    """Filters for groups that are not worth an update.

    The scheduler replaces them with new groups during the rollout.
    """

    accuracy_bounds: tuple[Share, Share] = (0.0, 1.0)
    """Filter groups whose success rate is outside these bounds; (0, 1) keeps every group."""

    drop_equal: Literal["none", "success", "return"] = "none"
    """Filter groups whose episodes all have the same success, or the same return of the
    environment. This is DAPO's dynamic sampling."""

    drop_truncated: bool = False
    """Filter groups with an episode that a limit truncated unsolved."""

    mask_truncated: bool = False
    """Do not train on episodes that a limit truncated unsolved; they still count in their group's
    baseline. This is DAPO's overlong filtering."""

    def __post_init__(self) -> None:
        low, high = self.accuracy_bounds
        self.require(low <= high, "accuracy_bounds", "two rates, the lower one first")


class LearningConfig(Config, frozen=True, kw_only=True):
    """Settings shared by every reinforcement learning run."""

    run: RunConfig = RunConfig()

    pipeline: str = "grpo"
    """grpo, ppo, dapo, gspo, cpgd, nft, embodied_srpo, embodied_grpo, embodied_ppo, off_policy, or your
    own as "module:function". On the command line and in files it also sets its default settings."""

    group_size: PositiveInt = 4
    """Episodes from the same start. At least 2 if the advantage compares them with each other."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature for rollout and training."""

    filter: FilterConfig = FilterConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    overlong: OverlongConfig = OverlongConfig()
    kl_in_reward: KlRewardConfig = KlRewardConfig()

    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=2, max_staleness=1)
    engine: EngineConfig = EngineConfig()
    cluster: ClusterConfig = ClusterConfig()
    learner: LearnerConfig = LearnerConfig()
    critic: CriticConfig = CriticConfig()

    @classmethod
    def task_settings(cls, pipeline: str) -> Mapping[str, Any]:
        """Return what the task needs of this pipeline, nested as in a file. It replaces the
        pipeline's default settings; a file and the command line replace both.
        """
        return {}

    def __post_init__(self) -> None:
        self.require(
            self.group_size >= 2 or not self.advantage.needs_group,
            "group_size",
            "at least 2 episodes, so that they can be compared",
        )
        require_satisfiable(
            self.episodes_per_group,
            *self.filter.accuracy_bounds,
            needs_difference=self.filter.drop_equal == "success",
        )
        self.scheduler.require_feasible(num_envs=self.num_envs, group_size=self.episodes_per_group)
        # a loss without importance weights is exact for weights of today alone, and diverges slowly
        # else
        once = self.learner.steps_once_per_update
        safe_policy_loss(
            self.learner.loss, self.scheduler.max_staleness, steps_once_per_update=once
        )
        if self.scheduler.deterministic != self.engine.is_deterministic:
            raise ConfigError(
                f"scheduler.deterministic is {self.scheduler.deterministic} and "
                f"engine.is_deterministic {self.engine.is_deterministic}: expected both or "
                "neither, because one alone is not reproducible"
            )

    def make_own_pool(self, runtime: Runtime) -> EnvPool | None:
        """Return a pool of other environments than the built-in kinds, which the run opens with
        `async with` and whose `metrics()` it reads; None: there is none.
        """
        return None

    @property
    def num_envs(self) -> int:
        """Number of episodes that can run at the same time."""
        raise TypeError(
            f"{type(self).__name__} has no environments; use TrainingConfig, or TextTrainingConfig"
        )

    @property
    def needs_greedy_baseline(self) -> bool:
        """Whether each group has one more, greedy episode as the baseline of the others (ReMax)."""
        return self.advantage.name == "remax"

    @property
    def episodes_per_group(self) -> int:
        """Number of episodes from the same start: `group_size`, and one if ReMax is used."""
        return self.group_size + self.needs_greedy_baseline


class TrainingConfig(LearningConfig, frozen=True, kw_only=True):
    """Reinforcement learning of one policy in simulators, which run in their own processes."""

    simulators: SimulatorConfig = SimulatorConfig(num_envs=max(os.cpu_count() or 1, 1))

    def unused_options(self) -> Mapping[str, str]:
        """Return the options of language policies."""
        # refused and not ignored: a limit of tokens that nobody reads would look as if it held
        others = dict.fromkeys(OF_LANGUAGE_POLICIES, "it is for language policies only")
        return {**super().unused_options(), **others}

    @property
    def num_envs(self) -> int:
        """Number of simulators."""
        return self.simulators.num_envs


class TextTrainingConfig(LearningConfig, frozen=True, kw_only=True):
    """Reinforcement learning of language policies in text environments.

    The environments run as coroutines of this process.
    """

    text: TextPoolConfig = TextPoolConfig()
    chat: ChatLimits = ChatLimits()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.run.require(
            self.run.record_to is None,
            "record_to",
            "none: conversations have no control steps to record",
        )

    def unused_options(self) -> Mapping[str, str]:
        """Return the options of simulators and of policies that act in them."""
        # named one by one, so that an option of both kinds is never refused for one
        of_robots = ("engine.cuda_graphs", "run.chaos_every_s", "run.record_to")
        others = dict.fromkeys(of_robots, "it is for runs with simulators only")
        return {**super().unused_options(), **others}

    @property
    def num_envs(self) -> int:
        """Number of conversations that can run at the same time."""
        return self.text.num_envs


class MixedTrainingConfig(TrainingConfig, frozen=True, kw_only=True):
    """Reinforcement learning of policies in simulators and in text environments, in one run."""

    text: TextPoolConfig = TextPoolConfig()
    chat: ChatLimits = ChatLimits()

    def unused_options(self) -> Mapping[str, str]:
        """Return no options of one kind of policy, because both learn."""
        return LearningConfig.unused_options(self)

    @property
    def num_envs(self) -> int:
        """Number of simulators and conversations that can run at the same time."""
        return self.simulators.num_envs + self.text.num_envs


class PlannerTrainingConfig(TrainingConfig, frozen=True, kw_only=True):
    """Reinforcement learning of a planner and of the robot that it calls, in one run of simulators."""

    planner: PlannerConfig = PlannerConfig()

    def unused_options(self) -> Mapping[str, str]:
        """Return no options of one kind of policy, because both learn."""
        return LearningConfig.unused_options(self)


OF_EPISODES: Final = (
    *(
        "scheduler",
        "simulators",
        "engine",
        "cluster",
        "filter",
        "reward",
        "temperature",
        "held_out",
    ),
    *("run.record_to", "run.chaos_every_s", "run.videos_every", "run.profile_updates"),
    *("off_policy.first_rows", "off_policy.updates_per_decision", "off_policy.max_steps"),
)
"""Options of the episodes that a run collects."""


class EmbodiedConfig(TrainingConfig, frozen=True, kw_only=True):
    """Reinforcement learning of robots, with the settings of pipelines that use videos."""

    pipeline: str = "embodied_srpo"
    """embodied_srpo, embodied_grpo, embodied_ppo, or any other pipeline, or your own as
    "module:function". On the command line and in files it also sets its default settings."""

    embedding: EmbeddingConfig = EmbeddingConfig()
    srpo: SrpoConfig = SrpoConfig()
    off_policy: OffPolicyConfig = OffPolicyConfig()
    replay: RunReplayConfig = RunReplayConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        share, replay = self.off_policy.demonstrations, self.replay
        # stored rows of another run may be demonstrations; that is seen once they are read
        may_have = replay.demonstrations or replay.source or replay.existing == "load"
        if share and not may_have:
            raise ConfigError(
                f"off_policy.algorithm is {self.off_policy.algorithm!r}, which takes {share:g} of its rows from "
                "demonstrations, and replay.demonstrations names none; name a folder with some, or set "
                "off_policy.demonstration_share to 0"
            )

    def unused_options(self) -> Mapping[str, str]:
        """Return also the options of episodes for a run that learns from stored ones alone, and the other way round."""
        found = dict(super().unused_options())
        if self.replay.source is None:
            return {**found, "off_policy.offline_steps": "replay.from names no stored episodes"}
        why = "replay.from learns from stored episodes alone"
        return {**dict.fromkeys(OF_EPISODES, why), **found}
