"""GRPO on recorded scenes of NavSim: `python -m vla_rl.recipes.grpo_navsim --folder navtrain_scenes`.

One decision a scene: 8 waypoints over 4 s, graded by EPDMS or PDMS. Trajectories of a group share a
scene, and each one's score is compared with the group's mean; `--reward-of` weighs sub-scores. The
scenes come from a navsim install by what `vla-rl export navsim DIR` writes; training itself needs no
navsim. `eval_navsim` prints the benchmark's table of the trained policy.
"""

import sys
from functools import partial
from pathlib import Path

from vla_rl.algorithms import AdvantageConfig
from vla_rl.algorithms.losses import PolicyLossConfig
from vla_rl.cli.command_line import TrainingLaunch
from vla_rl.cli.launch import run_recipe
from vla_rl.envs.driving.scores.navsim import list_recorded
from vla_rl.errors import ConfigError
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.driving_training import BY_GROUP_MEAN, IMAGE_SIZE, SceneTrainingConfig, main
from vla_rl.rollout import SchedulerConfig
from vla_rl.types import EnvSpec, PositiveFloat, PositiveInt


class GrpoNavsimConfig(SceneTrainingConfig, frozen=True, kw_only=True):
    """GRPO on recorded scenes."""

    run: RunConfig = RunConfig(name="grpo_navsim", updates=60, checkpoint_every=20, videos_every=60)
    pipeline: str = "embodied_grpo"
    advantage: AdvantageConfig = BY_GROUP_MEAN
    group_size: PositiveInt = 8
    temperature: PositiveFloat = 0.4
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=16, max_staleness=1)
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=2e-4, warmup_steps=10),
        loss=PolicyLossConfig(clip_low=0.2, clip_high=0.28),
        minibatch_trajectories=64,
    )

    folder: str = "navtrain_scenes"
    """Folder of the training scenes, written by export_scenes.py."""

    held_out_folder: str = "navtest_scenes"
    """Folder of the held-out scenes; `held_out.scenes` of them are reported, from the first by
    name, and with `held_out.every` the next ones choose the best checkpoint."""

    image_size: int = IMAGE_SIZE
    """Side in pixels that images are resized to: what the policy was trained with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        has_route = self.action == "along_route"
        self.require(not has_route, "action", "moves or profiles, because NavSim gives no route")

    @property
    def task(self) -> str:
        """Name of the scenes in metrics and results."""
        return "navsim"

    def env_of(self, split: str) -> EnvSpec:
        """Return the environment over `train` or `held_out`."""
        kwargs = {
            "folder": str(self._folder_of(split)),
            "version": self.version,
            "reward": self.reward_of,
            "action": self.action,
            "image_size": self.image_size,
        }
        return EnvSpec(id="vla_rl/navsim-v0", kwargs=kwargs)

    def num_scenes(self, split: str) -> int:
        """Return the number of scenes of `train` or `held_out` that are used."""
        try:
            # counted here, so that a wrong folder is refused before the policy is loaded
            found = len(list_recorded(self._folder_of(split)))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        wanted = self.held_out.scenes + self.held_out.num_choosing
        return found if split == "train" else min(found, wanted)

    def _folder_of(self, split: str) -> Path:
        return Path(self.folder if split == "train" else self.held_out_folder).resolve()


cli = partial(run_recipe, TrainingLaunch, GrpoNavsimConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
