"""What every training run is told, whatever its task: sizes, seeds, and what it leaves behind."""

import os
from typing import Literal

from vla_rl.algorithms import AdvantageConfig, EmbeddingConfig, SrpoConfig, policy_loss_for
from vla_rl.algorithms.filters import OverlongConfig, require_satisfiable
from vla_rl.algorithms.kl_in_reward import KlRewardConfig
from vla_rl.engines import EngineConfig
from vla_rl.envs.text import TextPoolConfig
from vla_rl.errors import ConfigError
from vla_rl.learning import CriticConfig, LearnerConfig
from vla_rl.nodes.rewards import RewardConfig
from vla_rl.rollout import ChatLimits, SchedulerConfig
from vla_rl.simulation import SimulatorConfig
from vla_rl.types import Config


class RunConfig(Config, frozen=True, kw_only=True):
    """How long a run is, and what it leaves behind."""

    name: str = "run"
    """First part of the run directory's name."""

    root: str = "runs"
    """Folder in which run directories are made."""

    updates: int = 5
    """Weight updates to make, those before a resume included."""

    seed: int = 0
    """The one seed from which all others follow."""

    checkpoint_every: int = 1
    """Updates between checkpoints; the last update is always saved."""

    keep_checkpoints: int = 2
    """Checkpoints to keep, the newest ones."""

    videos_every: int = 5
    """In each window of this many updates, the first success and the first failure of every task become videos. Of the
    pipelines that ship, those whose name begins with `embodied_` make videos."""

    stall_warning_s: float = 120.0
    """When nothing moved for this long, the watchdog prints who waits for whom and all task stacks."""

    chaos_every_s: float | None = None
    """Kill or freeze a simulator at random, every so many seconds on average, to see that a run survives it; none leaves
    them alone."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy and the learner compute; auto takes the first GPU, or says that there is none."""

    torch_threads: int = 1
    """Threads that the policy and the learner compute with on a CPU; the simulators need cores too."""

    record_to: str | None = None
    """Also write every control step of every training episode into this LeRobotDataset; slower, as all of them are drawn."""

    wandb_project: str | None = None
    """Also log to this project of Weights & Biases (needs the extra `wandb`)."""

    def __post_init__(self) -> None:
        for field in ("updates", "checkpoint_every", "keep_checkpoints", "videos_every", "torch_threads"):
            self.require(getattr(self, field) >= 1, field, "at least 1")
        self.require(self.stall_warning_s > 0, "stall_warning_s", "above 0 seconds")
        has_pause = self.chaos_every_s is None or self.chaos_every_s > 0
        self.require(has_pause, "chaos_every_s", "above 0 seconds, or none")


class FilterConfig(Config, frozen=True, kw_only=True):
    """Which groups are worth an update. The others are replaced while the rollout goes on, and give their place back."""

    accuracy_bounds: tuple[float, float] = (0.0, 1.0)
    """Groups whose success rate lies outside are filtered; (0, 1) keeps every group."""

    drop_equal: Literal["none", "success", "return"] = "none"
    """Filter groups whose members all had the same success, or the same return of the environment: DAPO's dynamic
    sampling."""

    drop_truncated: bool = False
    """Filter groups with a member that a limit cut off unsolved."""

    mask_truncated: bool = False
    """Episodes that a limit cut off unsolved count in their group's baseline, but are not learnt from: DAPO's overlong
    filtering."""

    def __post_init__(self) -> None:
        low, high = self.accuracy_bounds
        self.require(0.0 <= low <= high <= 1.0, "accuracy_bounds", "two rates with 0 <= low <= high <= 1")


class LearningConfig(Config, frozen=True, kw_only=True):
    """Reinforcement learning by any pipeline, whoever acts and wherever."""

    run: RunConfig = RunConfig()

    pipeline: str = "grpo"
    """grpo, ppo, dapo, gspo, cpgd, embodied_srpo, embodied_grpo, embodied_ppo, or your own as "module:function". On
    the command line and in files it also sets the defaults that belong to it."""

    group_size: int = 4
    """Episodes from the same start; their rewards are compared with each other."""

    temperature: float = 1.0
    """Of the policy's distribution over actions, in rollout and in training alike."""

    filter: FilterConfig = FilterConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    overlong: OverlongConfig = OverlongConfig()
    kl_in_reward: KlRewardConfig = KlRewardConfig()

    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=2, max_staleness=1)
    engine: EngineConfig = EngineConfig()
    learner: LearnerConfig = LearnerConfig()
    critic: CriticConfig = CriticConfig()

    def __post_init__(self) -> None:
        needs_group = self.advantage.needs_group
        self.require(
            self.group_size >= (2 if needs_group else 1),
            "group_size",
            "at least 2 episodes, so that there is something to compare" if needs_group else "at least 1 episode",
        )
        self.require(self.temperature > 0.0, "temperature", "above 0")
        require_satisfiable(
            self.episodes_per_group, *self.filter.accuracy_bounds, needs_difference=self.filter.drop_equal == "success"
        )
        self.scheduler.require_feasible(num_envs=self.num_envs, group_size=self.episodes_per_group)
        once = self.learner.steps_once_per_update
        policy_loss_for(self.learner.loss, self.scheduler.max_staleness, steps_once_per_update=once)
        if self.scheduler.deterministic != self.engine.is_deterministic:
            raise ConfigError(
                f"scheduler.deterministic is {self.scheduler.deterministic} and engine.is_deterministic "
                f"{self.engine.is_deterministic}: expected both or neither, as one without the other reproduces nothing"
            )

    @property
    def num_envs(self) -> int:
        """Episodes that can play at the same time."""
        raise TypeError(f"{type(self).__name__} has no environments; use TrainingConfig, or TextTrainingConfig")

    @property
    def needs_greedy_baseline(self) -> bool:
        """Whether one episode more of each group is played greedily, for the others to be compared with: ReMax."""
        return self.advantage.name == "remax"

    @property
    def episodes_per_group(self) -> int:
        """Episodes that are played from the same start: `group_size`, and the greedy one where it is needed."""
        return self.group_size + self.needs_greedy_baseline


class TrainingConfig(LearningConfig, frozen=True, kw_only=True):
    """Reinforcement learning of one policy in simulators, which live in processes of their own."""

    simulators: SimulatorConfig = SimulatorConfig(num_envs=max(os.cpu_count() or 1, 1))

    @property
    def num_envs(self) -> int:
        """Simulators."""
        return self.simulators.num_envs


class TextTrainingConfig(LearningConfig, frozen=True, kw_only=True):
    """Reinforcement learning of language policies in text environments, which are coroutines of this process."""

    text: TextPoolConfig = TextPoolConfig()
    chat: ChatLimits = ChatLimits()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.run.require(self.run.record_to is None, "record_to", "none: conversations have no control steps to record")

    @property
    def num_envs(self) -> int:
        """Conversations at a time."""
        return self.text.num_envs


class MixedTrainingConfig(TrainingConfig, frozen=True, kw_only=True):
    """Reinforcement learning of policies in simulators and of others in text environments, in one run."""

    text: TextPoolConfig = TextPoolConfig()
    chat: ChatLimits = ChatLimits()

    @property
    def num_envs(self) -> int:
        """Simulators, and conversations at a time."""
        return self.simulators.num_envs + self.text.num_envs


class EmbodiedConfig(TrainingConfig, frozen=True, kw_only=True):
    """The same for robots: what pipelines that look at videos are told besides."""

    pipeline: str = "embodied_srpo"
    """embodied_srpo, embodied_grpo, embodied_ppo, or any other pipeline, or your own as "module:function". On the command
    line and in files it also sets the defaults that belong to it."""

    embedding: EmbeddingConfig = EmbeddingConfig()
    srpo: SrpoConfig = SrpoConfig()
