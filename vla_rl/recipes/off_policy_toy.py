"""Off-policy learning on the toy reaching task, in a minute: `python -m vla_rl.recipes.off_policy_toy`.

A head of 6,000 parameters learns over a frozen policy: an MLP with random weights, which sees only where
the hand is. Every episode is stored in the run's replay buffer. `--policy` takes the folder of a policy
instead, such as the small flow policy that `sft_toy` writes; then `--steering.kind noise` steers its
noise.
"""

import sys
from functools import partial
from typing import TYPE_CHECKING

from vla_rl.algorithms import AdvantageConfig
from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.launch import launch, run_recipe
from vla_rl.cli.memory_plan import EpisodeFootprint
from vla_rl.errors import ConfigError
from vla_rl.evaluation import HeldOutEvaluator
from vla_rl.learner import OptimizerConfig
from vla_rl.learner.off_policy.config import CriticNetworkConfig, OffPolicyConfig
from vla_rl.models.prismatic.conventions import AS_STORED
from vla_rl.models.steered import SteeringConfig
from vla_rl.pipelines.config import RunConfig
from vla_rl.pipelines.nodes.rewards import RewardConfig
from vla_rl.recipes.srpo_toy import (
    ACTION_DIM,
    NUM_BINS,
    SrpoToyConfig,
    choosing_episodes,
    held_out_episodes,
    training_starts,
)
from vla_rl.rollout import SchedulerConfig
from vla_rl.types import PositiveInt, derive_seed

if TYPE_CHECKING:
    from vla_rl.models.steered import SteeredPolicy


class OffPolicyToyConfig(SrpoToyConfig, frozen=True, kw_only=True):
    """Off-policy learning on the reaching task."""

    run: RunConfig = RunConfig(
        name="off_policy_toy", updates=16, checkpoint_every=8, videos_every=16
    )
    pipeline: str = "off_policy"
    group_size: PositiveInt = 1
    """Episodes from each start; nothing is compared within a group."""

    advantage: AdvantageConfig = AdvantageConfig(name="reinforce_plus_plus")
    reward: RewardConfig = RewardConfig(function="success")
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=32, max_staleness=1)
    off_policy: OffPolicyConfig = OffPolicyConfig(
        gamma=0.98,
        batch=128,
        first_rows=200,
        critic_first_steps=200,
        updates_per_decision=2.0,
        actor=OptimizerConfig(lr=1e-3, warmup_steps=0),
        critic=CriticNetworkConfig(
            hidden=(64, 64), optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0)
        ),
    )

    policy: str | None = None
    """Folder of the frozen policy. None: an MLP with random weights."""

    steering: SteeringConfig = SteeringConfig(
        hidden=(64, 64), scale=(2.0,), std=0.8, proprio_size=2
    )
    """The head that is trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steering.require(
            self.steering.proprio_size <= ACTION_DIM,
            "proprio_size",
            f"at most {ACTION_DIM}, the numbers of the state",
        )


def new_policy(config: OffPolicyToyConfig) -> "SteeredPolicy":
    """Put a new head over the frozen policy. Raises: ConfigError, CheckpointError."""
    # they import torch, which `--help` does without
    from vla_rl.models.loading import choose_device
    from vla_rl.models.mlp import MlpConfig, MlpPolicy
    from vla_rl.models.steered import SteeredPolicy
    from vla_rl.models.steered.folder import load_base

    seed = derive_seed(config.run.seed, "policy")
    if config.policy is not None:
        device = choose_device(config.run.device)
        rows = config.steering.features == "rows"
        frozen = load_base(config.policy, AS_STORED, device, rows)
        facts = frozen.policy.config
        if not (
            set(facts.cameras) <= {"image"}
            and facts.state_size in (None, ACTION_DIM)
            and facts.action_dim == ACTION_DIM
        ):
            raise ConfigError(
                f"policy {config.policy} sees {sorted(facts.cameras)} and a state of {facts.state_size} numbers, and "
                f"gives actions of {facts.action_dim}; expected no camera but 'image', and {ACTION_DIM} numbers of "
                "both: give a policy of the reaching task, such as sft_toy's"
            )
        return SteeredPolicy.create(frozen, config.steering, seed)
    shape = MlpConfig(
        state_size=ACTION_DIM,
        action_low=(-1.0,) * ACTION_DIM,
        action_high=(1.0,) * ACTION_DIM,
        num_bins=NUM_BINS,
        chunk_size=config.chunk_size,
    )
    base = MlpPolicy.create(shape, derive_seed(config.run.seed, "base"))
    return SteeredPolicy.create(base, config.steering, seed)


async def main(command: Command[TrainingLaunch, OffPolicyToyConfig]) -> int:
    """Plan, draw or train, as the command line says."""
    config = command.config
    model, held_out = new_policy(config), held_out_episodes(config)
    print(model.describe(), flush=True)
    return await launch(
        command,
        training_starts(config),
        model,
        EpisodeFootprint(
            what_runs="vla_rl/toy_reach-v0",
            simulator_mb=15,
            server_mb=60,
            chunk_bytes=3 * 32 * 32 + 1024,
            num_chunks=-(-config.step_limit // model.config.chunk_size),
        ),
        evaluator=HeldOutEvaluator(
            held_out, choose=choosing_episodes(config), schedule=config.held_out
        )
        if held_out
        else None,
    )


cli = partial(run_recipe, TrainingLaunch, OffPolicyToyConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
