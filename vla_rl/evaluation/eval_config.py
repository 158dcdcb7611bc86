"""The configuration of an evaluation on any benchmark, and what its results depend on."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import tyro

from vla_rl.errors import ConfigError
from vla_rl.evaluation.benchmark import Benchmark, SuiteTask, benchmark_of, expected_of
from vla_rl.evaluation.plan import planned_episodes
from vla_rl.evaluation.scenes import Quality, Scene
from vla_rl.models.loading import CheckpointConfig, compute_digest
from vla_rl.types import EnvSpec


class EvalConfig(CheckpointConfig, frozen=True, kw_only=True):
    """The checkpoint, the episodes and the conditions of an evaluation on any benchmark."""

    benchmark: ClassVar[Benchmark]
    """The benchmark whose suites are evaluated."""

    checkpoint: tyro.conf.Positional[str]
    """Folder or hub id of an OpenVLA or OpenVLA-OFT checkpoint."""

    suites: tuple[str, ...]
    """Suites of the benchmark."""

    tasks: str = "all"
    """Tasks of each suite by the benchmark's numbers: all, or numbers and ranges such as 0-3,7."""

    init_states: str = "all"
    """Initial states of each task: all, or numbers and ranges, such as 40-49 for those that
    training did not use."""

    step_limit: int | None = None
    """Control steps after which an episode is a failure. None: each suite's published limit. Set
    512 for SRPO's limit."""

    temperature: float | None = None
    """Sample actions at this temperature, above 0. None: take the most likely action."""

    image_size: int | None = None
    """Side of the camera images in pixels. None: 84 for the shipped policy, else 256, as published
    policies were trained."""

    quality: Quality | None = None
    """Rendering quality. exact renders what published policies saw; fast renders without smoothing
    and with a plain robot, at a fraction of the cost. None: fast for the shipped policy, which was
    trained with it, else exact."""

    num_envs: int = max(os.cpu_count() or 1, 1)
    """Number of simulator processes, and so of episodes that run at the same time. Default: one for
    each core."""

    torch_threads: int = 1
    """Threads for the policy on a CPU. The simulators need cores too."""

    videos: Literal["none", "failures", "successes", "both"] = "failures"
    """Episodes to make videos of."""

    videos_per_task: int = 3
    """Maximum number of videos of each task and outcome."""

    record_to: str | None = None
    """Also write every control step of every episode into this LeRobotDataset. Slower, because
    every step is rendered."""

    root: str = "runs"
    """Parent of the evaluation's folder."""

    name: str = "eval"
    """First part of the folder's name."""

    seed: int = 0
    """Seed of sampled actions."""

    def __post_init__(self) -> None:
        self.require(len(self.suites) > 0, "suites", "at least one suite")
        self.require(
            self.step_limit is None or self.step_limit >= 1,
            "step_limit",
            "at least 1 control step, or none",
        )
        self.require(
            self.temperature is None or self.temperature > 0,
            "temperature",
            "above 0, or none for greedy",
        )
        for field in ("num_envs", "torch_threads", "videos_per_task"):
            self.require(getattr(self, field) >= 1, field, "at least 1")
        for suite in self.suites:
            self.require(
                benchmark_of(suite) is self.benchmark,
                "suites",
                f"suites of {expected_of(self.benchmark, suite)}",
            )
        planned_episodes(self)

    def unread(self) -> Mapping[str, str]:
        """Return the options of videos, if there are none."""
        return {} if self.videos != "none" else {"videos_per_task": "videos is 'none'"}

    @property
    def scene(self) -> Scene:
        """Conditions of the environments."""
        raise NotImplementedError

    @property
    def checkpoint_folder(self) -> str:
        """Folder or hub id of the checkpoint that `checkpoint` names."""
        return self.checkpoint

    def envs_of(self, task: SuiteTask) -> Sequence[EnvSpec]:
        """Return the environments in which each start of a task is run."""
        return [self.scene.env(task.suite, task.task_id)]

    def found(self) -> dict[str, str]:
        """Return conditions that are found on this machine. Raises: ConfigError."""
        return {}

    def is_chosen(self, task: SuiteTask) -> bool:
        """Return whether one of the tasks that `tasks` names is run."""
        return True


MAY_CHANGE: Final = (
    "suites",
    "tasks",
    "perturbations",
    "init_states",
    "scene_seeds",
    "num_envs",
    "torch_threads",
    "videos",
    "videos_per_task",
)
"""Fields that may change on a resume; a change of any other would mix results of different
conditions."""


def conditions_of(config: EvalConfig) -> dict[str, Any]:
    """Return everything that results depend on, as plain values.

    Raises: CheckpointError; ConfigError without assets.
    """
    names = set(config.__struct_fields__) - {
        *MAY_CHANGE,
        "root",
        "name",
        "record_to",
        "assets",
        "checkpoint",
    }
    return {
        "checkpoint": config.checkpoint_folder,
        "checkpoint_digest": compute_digest(config.open(config.checkpoint_folder)),
        **config.found(),
        **{name: getattr(config, name) for name in sorted(names)},
        "image_size": config.scene.image_size,
        "quality": config.scene.quality,
    }


def refuse_other_config(config: EvalConfig, before: EvalConfig, folder: Path) -> None:
    """Raise ConfigError if a field that may not change differs from the evaluation in `folder`."""
    for name in config.__struct_fields__:
        if name not in MAY_CHANGE and getattr(config, name) != getattr(before, name):
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}, but the episodes in {folder} were run with "
                f"{getattr(before, name)!r}; start another evaluation, because one table cannot "
                "hold both"
            )
