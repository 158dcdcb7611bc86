"""Off-policy learning on LIBERO: `python -m vla_rl.recipes.off_policy_libero`.

A small head learns over a frozen policy from every episode that was ever run: the run's own, those of an
expert or a person, demonstrations. `off_policy.algorithm` names how. The policy is any that `srpo_libero`
trains; with `--steering.kind noise` a flow policy is steered by its first noise (DSRL).
"""

import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from vla_rl.algorithms import AdvantageConfig
from vla_rl.cli.command_line import TrainingLaunch
from vla_rl.cli.launch import run_recipe
from vla_rl.learner.off_policy.config import OffPolicyConfig
from vla_rl.models.steered import SteeringConfig
from vla_rl.pipelines.config import RunConfig
from vla_rl.pipelines.nodes.rewards import RewardConfig
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig, main
from vla_rl.rollout import SchedulerConfig
from vla_rl.types import PositiveFloat, PositiveInt, derive_seed

if TYPE_CHECKING:
    from vla_rl.models.steered import SteeredPolicy


class OffPolicyLiberoConfig(SrpoLiberoConfig, frozen=True, kw_only=True):
    """Off-policy learning on LIBERO: the episodes of `SrpoLiberoConfig`, and these settings."""

    run: RunConfig = RunConfig(name="off_policy_libero", updates=60, checkpoint_every=5)
    pipeline: str = "off_policy"
    group_size: PositiveInt = 1
    """Episodes from each start; nothing is compared within a group."""

    temperature: PositiveFloat = 1.0
    """Factor of the head's exploration noise (`steering.std`) in training episodes."""

    advantage: AdvantageConfig = AdvantageConfig(name="reinforce_plus_plus")
    reward: RewardConfig = RewardConfig(function="success")
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=16, max_staleness=1)
    # failures end at the step limit alone: if values went on behind it, nothing would ever lower one
    off_policy: OffPolicyConfig = OffPolicyConfig(
        algorithm="rlt", updates_per_decision=10.0, bootstrap=False
    )
    steering: SteeringConfig = SteeringConfig(
        scale=(0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 2.0), proprio_size=8
    )
    """The head that is trained. The last of the seven scales is of the gripper, which must be able to
    turn over."""

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.benchmark.state_size
        self.steering.require(
            self.steering.proprio_size <= size,
            "proprio_size",
            f"at most {size}, the numbers of the state",
        )

    def unused_options(self) -> Mapping[str, str]:
        """Return also what would train the policy itself."""
        parts = ("train", "lora_rank", "recompute_activations")
        why = "the policy is frozen, and its head is trained"
        of_heads = {"policy_format.base_policy": "policy is the frozen base itself; name it there"}
        return {**super().unused_options(), **dict.fromkeys(parts, why), **of_heads}

    def load_starting_policy(self) -> "SteeredPolicy":
        """Put a new head over the frozen policy. Raises: ConfigError, CheckpointError."""
        # they import torch, which `--help` does without
        from vla_rl.evaluation.suites import require_fitting
        from vla_rl.models.loading import choose_device
        from vla_rl.models.steered import SteeredPolicy
        from vla_rl.models.steered.folder import load_base

        base = load_base(
            self.policy_folder,
            self.policy_format,
            choose_device(self.run.device),
            self.steering.features == "rows",
        )
        size = self.scene.image_size
        require_fitting(base.policy, self.policy_folder, self.benchmark, size)
        if self.compile_blocks:
            base.policy.compile_blocks()
        return SteeredPolicy.create(base, self.steering, derive_seed(self.run.seed, "head"))


cli = partial(run_recipe, TrainingLaunch, OffPolicyLiberoConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
