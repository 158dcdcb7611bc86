"""Train a flow policy on successes and failures: `python -m vla_rl.recipes.recap_flow --from base --out better`.

RECAP (pi*0.6, arXiv:2511.14759). A value network learns from stored episodes how they go on; control steps
that went better than expected are labelled "Advantage: positive" in the prompt, all others "Advantage:
negative"; the policy is fine-tuned on all of them, and acts with the positive label from then on:

    vla-rl eval_libero base --suites libero_goal --record-to collected                episodes of the policy
    vla-rl recap_flow --from base --demonstrations demos --collected collected --out better
    vla-rl eval_libero better --suites libero_goal --record-to collected2 --flow-guidance 1.5
    vla-rl recap_flow --from better --demonstrations demos --collected collected collected2 --out best

Demonstrations are positive at every step, and so is what an expert chose in a collected episode. No
simulator runs before the trial at the end.
"""

import asyncio
import random
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from vla_rl import engines
from vla_rl.cli.command_line import Command, Launch
from vla_rl.cli.launch import run_recipe
from vla_rl.datasets import RecordedEpisode, open_dataset
from vla_rl.errors import ConfigError, DataError
from vla_rl.learner import ImitationConfig, OptimizerConfig
from vla_rl.learner.config import RecapValueConfig
from vla_rl.models.loading import require_new_folder
from vla_rl.models.prismatic.conventions import Guidance
from vla_rl.recipes.sft_flow import (
    SftFlowConfig,
    read_images,
    save_merged,
    seed_draws,
    starting_policy,
)
from vla_rl.run.fine_tuning import (
    TrainingBatches,
    fine_tune,
    list_save_folders,
    read_demonstrations,
)
from vla_rl.run.recap import AdvantageLabelConfig, label_episodes, labelled_batches
from vla_rl.run.trial import plan_trial, require_env, run_trial
from vla_rl.types import PositiveInt, derive_seed

if TYPE_CHECKING:
    from vla_rl.models.flow.policy import FlowPolicy

BATCHES: Final = "vla_rl.run.recap:seeded_labels"


class RecapFlowConfig(SftFlowConfig, frozen=True, kw_only=True):
    """Fine-tuning of a flow policy on labelled control steps of successes and failures."""

    collected: tuple[str, ...] = ("collected",)
    """Data sets of episodes of policies that say whether they succeeded, as eval_libero --record-to and
    --run.record-to write them."""

    labels: AdvantageLabelConfig = AdvantageLabelConfig()

    value: RecapValueConfig = RecapValueConfig()

    guidance: Guidance = 1.0
    """Guidance that the policy acts with, here and in its folder: 1 acts on "Advantage: positive" alone,
    above 1 goes further. An evaluation can choose another one (--flow-guidance)."""

    updates: PositiveInt = 1000
    """Optimizer steps."""

    imitation: ImitationConfig = ImitationConfig(
        optimizer=OptimizerConfig(lr=1e-4, warmup_steps=50, decay_steps=1000), micro_batch=16
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(len(self.collected) > 0, "collected", "at least one data set")

    def unused_options(self) -> Mapping[str, str]:
        """Return also how the policy that is loaded acted."""
        reason = "--guidance says how the new policy acts, and the data bring their labels"
        return {**super().unused_options(), "flow_guidance": reason}


def read_collected(config: RecapFlowConfig) -> list[RecordedEpisode]:
    """Open all data sets of collected episodes. Raises: ConfigError if one cannot be read."""
    try:
        return [
            each for folder in config.collected for each in open_dataset(Path(folder), config.data)
        ]
    except DataError as error:
        raise ConfigError(str(error)) from error


def with_guidance(policy: "FlowPolicy", guidance: float | None) -> "FlowPolicy":
    """Return the same policy, on the same weights, that acts by the positive label; None: by none."""
    sampling = msgspec.structs.replace(policy.config.sampling, advantage_guidance=guidance)
    return policy.with_sampling(sampling)


async def main(command: Command[Launch, RecapFlowConfig]) -> int:
    """Label the data, train the policy, save it and try it; return the exit status."""
    # torch takes seconds to import: `--help` and errors in options must not wait for it
    from vla_rl.learner.imitation_backend import Preparation
    from vla_rl.run.imitation import Samples

    config = command.config
    if config.checkpoint is None:
        raise ConfigError(
            "from is not set, expected the folder of a flow policy, whose features the values are learnt "
            "from; name the policy that ran the collected episodes (--from)"
        )
    require_new_folder(*list_save_folders(config))
    require_env(config.trial)
    demonstrations = await asyncio.to_thread(read_demonstrations, config)
    collected = await asyncio.to_thread(read_collected, config)
    images = await asyncio.to_thread(read_images, config)
    trial = plan_trial(config.trial, [*demonstrations, *collected], images)
    # a policy that was trained so before acts by a label, which here comes with the data
    loaded = await asyncio.to_thread(starting_policy, config, demonstrations)
    policy = with_guidance(loaded, None)
    acting = with_guidance(policy, config.guidance)
    print(acting.describe())
    print(f"{len(demonstrations)} demonstrations, {len(collected)} collected episodes")
    samples = Samples([*demonstrations, *collected], policy)
    if command.launch.dry_run:
        await asyncio.to_thread(samples.read_one_of_each_episode)
        print("everything that the command would read was found")
        return 0
    async with engines.DeviceLane(config.torch_threads) as lane:
        labelled = await label_episodes(
            policy, lane, demonstrations, collected, config.labels, config.value, config.seed
        )
        print("\n".join(labelled.lines))
        seed_draws(config.seed)
        dropout, shift = config.labels.dropout, config.shift
        draws = random.Random(derive_seed(config.seed, "labels"))
        batches = TrainingBatches(
            labelled_batches(policy, dropout, shift, draws),
            Preparation(BATCHES, {"dropout": dropout, "shift": shift}),
        )
        labelled_samples = Samples(labelled.episodes, policy)
        save = partial(save_merged, acting)
        status = await fine_tune(policy, labelled_samples, config, lane, save, batches)
        if status == 0:
            await run_trial(acting, lane, trial, demonstrations, config.trial.num_envs)
    return status


cli = partial(run_recipe, Launch, RecapFlowConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
