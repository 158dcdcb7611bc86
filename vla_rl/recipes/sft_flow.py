"""Fine-tune a flow policy on demonstrations: `python -m vla_rl.recipes.sft_flow --demonstrations demos --out base`.

Reads a LeRobotDataset, RLDS, LIBERO's HDF5 files or recordings of `record_demonstrations`, and trains a
small flow policy from random weights, or a folder of pi0, pi0.5 or SmolVLA as openpi or LeRobot saved it:

    ... --from lerobot/smolvla_base --statistics data --cameras image wrist_image none --train expert
    ... --from my_pi0 --lora-rank 32 --imitation.optimizer.lr 5e-5          adapters instead of the weights
    ... --trial.tasks libero_goal/7-9                                       the tasks to run afterwards

Afterwards 20 episodes are run from starts that the data do not have, and the share that is solved is
printed beside the data's own. The folder that is written has the layout of the one that it came from, with
adapters merged into the weights.
"""

import asyncio
import random
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import msgspec
import numpy as np
import tyro

from vla_rl import engines
from vla_rl.cli.command_line import Command, Launch
from vla_rl.cli.launch import run_recipe
from vla_rl.datasets import DatasetOptions, RecordedEpisode
from vla_rl.datasets.opening import read_image_settings
from vla_rl.errors import CheckpointError, ConfigError, DataError
from vla_rl.learner import ImitationConfig, OptimizerConfig
from vla_rl.models.loading import (
    CheckpointConfig,
    CheckpointFormat,
    load_policy,
    require_new_folder,
)
from vla_rl.recipes.new_flow_policy import NewPolicyConfig, describe_data, make_new_policy
from vla_rl.run.fine_tuning import (
    TrainingBatches,
    fine_tune,
    list_save_folders,
    read_demonstrations,
)
from vla_rl.run.trial import TrialConfig, plan_trial, require_env, run_trial
from vla_rl.types import (
    NonNegativeInt,
    PositiveInt,
    ReadIf,
    derive_seed,
)
from vla_rl.util.ownership import OwnedFolder

if TYPE_CHECKING:
    from vla_rl.models.flow.policy import FlowPolicy

PREFIX: Final = "vla_rl-tuned-"


class SftFlowConfig(CheckpointConfig, frozen=True, kw_only=True):
    """Supervised fine-tuning of a flow policy."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (ReadIf(("lora_alpha",), "lora_rank"),)

    demonstrations: str = "demos"
    """Folder of the data set: a LeRobotDataset, RLDS, LIBERO's .hdf5 files, or .npz files of
    `record_demonstrations`."""

    data: DatasetOptions = DatasetOptions()

    checkpoint: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """Folder or hub id of the policy to start from. None: a small policy with random weights (`--new`)."""

    new: NewPolicyConfig = NewPolicyConfig()

    statistics: Literal["policy", "data"] = "policy"
    """Statistics that scale states and actions, of a policy that is loaded. policy: its own; data: those of
    these data, for another robot, or for a folder that has none. A new policy always has the data's."""

    out: str = "base"
    """Folder that the checkpoint is written to. It must not exist yet."""

    save_every: PositiveInt | None = None
    """Also save every this many updates, to `<out>-000500` and so on. None: save only the last
    weights, or those of the update at which Ctrl-C stops the training."""

    train: Literal["all", "expert"] = "all"
    """Part that is trained: all, or the expert alone with the projections of state and actions; what reads
    images and prompt is frozen then."""

    lora_rank: PositiveInt | None = None
    """Rank of LoRA adapters that are trained instead of the weights of that part, such as 32. None: no
    adapters."""

    lora_alpha: PositiveInt = 16
    """Scale of the adapters, which are weighted by alpha / rank."""

    draws: PositiveInt = 4
    """Draws of noise and time for each sample. They share what is computed of images and prompt, which is
    most of the work."""

    shift: NonNegativeInt = 0
    """Pixels by which each image is moved at random in training, at most; 4 helps a small policy that sees
    84 pixels and few demonstrations. 0: not at all."""

    updates: PositiveInt = 3000
    """Optimizer steps."""

    batch: PositiveInt = 16
    """Samples in one optimizer step."""

    imitation: ImitationConfig = ImitationConfig(
        optimizer=OptimizerConfig(lr=5e-4, warmup_steps=100, decay_steps=3000), micro_batch=16
    )

    trial: TrialConfig = TrialConfig()

    torch_threads: PositiveInt = 1
    """Threads for the computation on a CPU."""

    seed: int = 0
    """Seed of the initial weights, the order of the samples, noise, times and shifts."""

    def __post_init__(self) -> None:
        if self.checkpoint is None:
            self.require(
                self.statistics == "policy",
                "statistics",
                "policy without --from: a new policy always has the data's",
            )

    def unused_options(self) -> Mapping[str, str]:
        """Return also the options of the policy that is not made or not loaded."""
        found = {
            "imitation.micro_batch_tokens": "it is for language policies only",
            "imitation.label_width": "it is for policies with tokens only",
        }
        if self.checkpoint is None:
            reason = "there is no checkpoint to start from (--from)"
            found |= dict.fromkeys(CheckpointFormat.__struct_fields__, reason)
        else:
            found["new"] = "the policy comes from a checkpoint (--from)"
        return {**super().unused_options(), **found}


def starting_policy(config: SftFlowConfig, episodes: Sequence[RecordedEpisode]) -> "FlowPolicy":
    """Load or create the policy to train, with the chosen part of it trainable.

    Raises: ConfigError, CheckpointError; DataError if the data fit no policy.
    """
    from vla_rl.models.flow.trained_parts import choose_trained
    from vla_rl.models.prismatic.config import LoraConfig

    if config.checkpoint is None:
        seed = derive_seed(config.seed, "policy")
        policy = make_new_policy(config.new, episodes, seed, config.device)
    else:
        policy = _load(config, episodes)
    sampling = msgspec.structs.replace(policy.config.sampling, imitation_draws=config.draws)
    policy = policy.with_sampling(sampling)
    lora = None
    if config.lora_rank is not None:
        lora = LoraConfig(rank=config.lora_rank, alpha=config.lora_alpha)
    seed = derive_seed(config.seed, "adapters")
    choose_trained(policy.network, config.train, lora, seed)
    return policy


def _load(config: SftFlowConfig, episodes: Sequence[RecordedEpisode]) -> "FlowPolicy":
    from vla_rl.models.flow.new_statistics import copy_with_statistics
    from vla_rl.models.flow.policy import FlowPolicy
    from vla_rl.models.tensor_reading import locate

    assert config.checkpoint is not None
    # before a copy is made: what is said of a folder names the one that the user named
    folder = locate(config.checkpoint)
    require_flow(folder)
    if config.statistics == "policy":
        _check_robot(folder, config.norm_key, episodes)
        policy = load_policy(config.checkpoint, config, config.device)
    else:
        room = OwnedFolder(PREFIX)
        copy, found = room.path / "policy", describe_data(episodes)
        try:
            copy_with_statistics(folder, copy, found)
            policy = load_policy(str(copy), config, config.device)
        except CheckpointError as error:
            said = str(error).replace(f"{copy}/", "")
            raise CheckpointError(f"{folder} with the demonstrations' statistics: {said}") from None
        finally:
            room.remove_folder()
    assert isinstance(policy, FlowPolicy)
    return policy


def require_flow(folder: Path) -> None:
    """Raise ConfigError for a policy of another family than the flows, before it is read as one of theirs."""
    from vla_rl.models.families import find_family
    from vla_rl.models.tensor_reading import holds_weights

    family = find_family(folder)
    if family is None and holds_weights(folder):
        raise ConfigError(
            f"{folder} is a policy of OpenVLA's families, expected a flow policy; sft_libero fine-tunes it"
        )
    if family is not None and family.fine_tuned_by != "sft_flow":
        raise ConfigError(
            f"{folder} is a policy of the family {family.name}, expected a flow policy"
        )


def _check_robot(folder: Path, asset: str | None, episodes: Sequence[RecordedEpisode]) -> None:
    """Compare the statistics of a folder with the data. Raises: CheckpointError for another robot's."""
    from vla_rl.models.families import find_family
    from vla_rl.models.flow.lerobot_folder import read_lerobot_folder
    from vla_rl.models.flow.pi_folder import find_project, read_settings
    from vla_rl.models.flow.robot_checks import check_gripper, check_units, check_widths

    family = find_family(folder)
    if family is None or family.name not in ("pi0", "pi05", "smolvla"):
        return  # a small policy's statistics are those of the data that it was made from
    is_lerobots = find_project(folder) == "lerobot"
    settings = read_lerobot_folder(folder) if is_lerobots else read_settings(folder, asset)[1]
    first = episodes[0]
    state = first.vectors.get("state")
    check_widths(settings, first.actions.shape[1], None if state is None else state.shape[1])
    actions = np.concatenate([episode.actions for episode in episodes])
    check_units("action", settings.action, actions)
    if state is not None:
        states = np.concatenate([episode.vectors["state"] for episode in episodes])
        check_units("state", settings.state, states)
    if first.has_gripper and first.actions.shape[1] > 1:
        check_gripper(settings, actions)


async def main(command: Command[Launch, SftFlowConfig]) -> int:
    """Train the policy, save it and try it; return the exit status."""
    # torch takes seconds to import: `--help` and errors in options must not wait for it
    from vla_rl.run.imitation import Samples

    config = command.config
    # before anything is read: hours later, a folder that exists would cost the whole training
    require_new_folder(*list_save_folders(config))
    require_env(config.trial)
    episodes = await asyncio.to_thread(read_demonstrations, config)
    images = await asyncio.to_thread(read_images, config)
    trial = plan_trial(config.trial, episodes, images)
    policy = await asyncio.to_thread(starting_policy, config, episodes)
    print(policy.describe())
    samples = Samples(episodes, policy)
    print(
        f"{len(samples)} samples of {len(episodes)} episodes; {config.updates} updates of "
        f"{config.batch} samples with {config.draws} draws each"
    )
    sizes = [(each.numel(), each.requires_grad) for each in policy.network.parameters()]
    trained = sum(number for number, is_trained in sizes if is_trained)
    print(f"{trained} of {sum(number for number, _ in sizes)} parameters are trained")
    if command.launch.dry_run:
        await asyncio.to_thread(samples.read_one_of_each_episode)
        print("everything that the command would read was found")
        return 0
    seed_draws(config.seed)
    async with engines.DeviceLane(config.torch_threads) as lane:
        status = await fine_tune(
            policy, samples, config, lane, partial(save_merged, policy), _shift(config, policy)
        )
        if status == 0:
            share = await run_trial(policy, lane, trial, episodes, config.trial.num_envs)
            if share == 0.0:
                print(
                    "nothing is solved: before any reinforcement learning, look at the statistics (of this "
                    "robot?), the cameras (in the policy's order?), the gripper's sign and the image size"
                )
    return status


def read_images(config: SftFlowConfig) -> dict[str, Any] | None:
    """Return how the data's images were drawn, if that is known. Raises: ConfigError."""
    try:
        return read_image_settings(Path(config.demonstrations))
    except DataError as error:
        raise ConfigError(str(error)) from error


def seed_draws(seed: int) -> None:
    """Seed torch's own state, from which the noise and the times of an update are drawn."""
    import torch

    torch.manual_seed(derive_seed(seed, "draws") % 2**63)


def _shift(config: SftFlowConfig, policy: "FlowPolicy") -> TrainingBatches | None:
    if config.shift == 0:
        return None
    from vla_rl.learner.imitation_backend import Preparation
    from vla_rl.run.shifted_images import shifted_batches

    draws = random.Random(derive_seed(config.seed, "shifts"))
    return TrainingBatches(
        shifted_batches(policy, config.shift, draws),
        Preparation("vla_rl.run.shifted_images:seeded_shifts", {"most": config.shift}),
    )


def save_merged(policy: "FlowPolicy", folder: Path) -> None:
    """Write a checkpoint in the policy's layout, with adapters merged into the weights."""
    from vla_rl.models.flow.trained_parts import has_adapters, merge_adapters

    if has_adapters(policy.network):
        policy = policy.copy()
        merge_adapters(policy.network)
    policy.save(folder)


cli = partial(run_recipe, Launch, SftFlowConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
