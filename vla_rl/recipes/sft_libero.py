"""Train a policy from demonstrations:
`python -m vla_rl.recipes.sft_libero --demonstrations demos --out base`.

Reads the files of `record_demonstrations`, LIBERO's HDF5 files or a LeRobotDataset, and trains a
small policy from random weights, or a checkpoint:

    ... --from openvla/openvla-7b --policy-family openvla_oft --lora-rank 32 --augment --statistics data
    ... --from CHECKPOINT --policy-family continuous        L1 error of a continuous head instead of cross-entropy
    ... --from openvla/openvla-7b --policy-family continuous --new-parts action_head proprio_projector --statistics data
                                                            the same from a checkpoint without such a head

Every control step is one sample: the observation, and the chunk of actions from there on. The
checkpoint is written in the public layout, with adapters merged into its weights; `eval_libero` and
`srpo_libero --policy` read it.
"""

import asyncio
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import msgspec
import tyro

from vla_rl import engines
from vla_rl.cli.command_line import Command, Launch
from vla_rl.cli.launch import run_recipe
from vla_rl.datasets import DatasetOptions, RecordedEpisode, compute_statistics
from vla_rl.datasets.opening import read_image_settings
from vla_rl.envs.libero.assets import PLACEHOLDER_ASSETS, are_placeholders
from vla_rl.errors import ConfigError, DataError
from vla_rl.learner import ImitationConfig, OptimizerConfig
from vla_rl.models.images import AugmentationConfig
from vla_rl.models.loading import (
    CheckpointConfig,
    CheckpointFormat,
    choose_device,
    load_openvla,
    require_new_folder,
    require_openvla,
)
from vla_rl.models.prismatic.config import NewPart
from vla_rl.run.fine_tuning import (
    TrainingBatches,
    fine_tune,
    list_save_folders,
    read_demonstrations,
)
from vla_rl.types import PositiveInt, ReadIf, derive_seed

if TYPE_CHECKING:
    from vla_rl.models.loading import VlaPolicy
    from vla_rl.models.prismatic.config import TrainingImages


_DEFAULT_FORMAT: Final = CheckpointFormat()


class SftLiberoConfig(CheckpointConfig, frozen=True, kw_only=True):
    """Supervised learning of a policy."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (
        ReadIf(("lora_alpha", "lora_targets"), "lora_rank"),
        ReadIf(("augmentation",), "augment"),
    )

    demonstrations: str = "demos"
    """Folder of the data set: a LeRobotDataset, LIBERO's .hdf5 files, or .npz files of
    `record_demonstrations`."""

    data: DatasetOptions = DatasetOptions()

    checkpoint: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """Folder or hub id of the checkpoint to start from. None: a small policy with random weights
    (`--tiny-head`)."""

    tiny_head: Literal["tokens", "l1", "diffusion"] = "tokens"
    """Head of the small policy. The loss of tokens is cross-entropy, of l1 the L1 error, of
    diffusion that of the noise."""

    new_parts: tuple[NewPart, ...] = ()
    """Parts that the checkpoint lacks, added with new weights: action_head (with --policy-family
    continuous, for continuous actions instead of tokens), proprio_projector, noisy_action_projector
    (with --head diffusion), film."""

    out: str = "base"
    """Folder that the checkpoint is written to. It must not exist yet."""

    save_every: PositiveInt | None = None
    """Also save every this many updates, to `<out>-000500` and so on. None: save only the last
    weights, or those of the update at which Ctrl-C stops the training."""

    lora_rank: PositiveInt | None = None
    """Rank of new LoRA adapters that are trained instead of the weights, such as 32. None: no new
    adapters."""

    lora_alpha: int = 16
    """Scale of the adapters, which are weighted by alpha / rank."""

    lora_targets: Literal["hidden", "all-linear"] = "hidden"
    """Layers that get an adapter. hidden: every linear layer but the output head; all-linear: also
    the output head and the patch convolutions, as in OpenVLA's and OpenVLA-OFT's fine-tuning."""

    statistics: Literal["policy", "data"] = "policy"
    """Statistics that scale actions and proprioception. policy: its own; data: the 1st and 99th
    percentile of these data (their minimum and maximum with `from` and `normalization` bounds),
    saved under `norm_key`, or else under the name of the data's folder."""

    augment: bool = False
    """Augment frames at random (crop, brightness, contrast, saturation, hue), each camera with its
    own draws."""

    augmentation: AugmentationConfig = AugmentationConfig()
    """Strength of the augmentation, if `augment` is set."""

    updates: PositiveInt = 3600
    """Optimizer steps."""

    batch: PositiveInt = 8
    """Samples in one optimizer step. Many small steps train better than few large ones."""

    imitation: ImitationConfig = ImitationConfig(
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=50, decay_steps=3600), micro_batch=8
    )
    recompute_activations: bool = False
    """Recompute activations in the backward pass instead of storing them: less memory, more
    computation."""

    compile_blocks: bool = False
    """Compile the policy's blocks by torch.compile: faster on a GPU. The first calls of each
    kind take about 10 s more there, and minutes on a CPU."""

    torch_threads: PositiveInt = 1
    """Threads for the computation on a CPU."""

    seed: int = 0
    """Seed of the initial weights, the order of the samples and the augmentation."""

    def __post_init__(self) -> None:
        is_one_choice = self.lora_rank is None or self.adapter_use != "train"
        self.require(
            is_one_choice, "lora_rank", "none with adapter_use train: either trains an adapter"
        )
        if self.checkpoint is None:
            for name in (*CheckpointFormat.__struct_fields__, "new_parts"):
                # refused and not ignored: a new policy would take no notice of them
                given, default = getattr(self, name), getattr(_DEFAULT_FORMAT, name, ())
                self.require(
                    given == default,
                    name,
                    "the default without --from: it describes the checkpoint to start from",
                )

    def unused_options(self) -> Mapping[str, str]:
        """Return also the options of a start from a checkpoint, if there is none, and those of
        language policies."""
        found = {"imitation.micro_batch_tokens": "it is for language policies only"}
        if self.checkpoint is None:
            of_checkpoints = (*CheckpointFormat.__struct_fields__, "new_parts")
            found |= dict.fromkeys(of_checkpoints, "there is no checkpoint to start from (--from)")
        else:
            found["tiny_head"] = "the policy comes from a checkpoint (--from)"
        return {**super().unused_options(), **found}


def starting_policy(config: SftLiberoConfig, episodes: list[RecordedEpisode]) -> "VlaPolicy":
    """Load or create the policy to train. Raises: ConfigError, CheckpointError."""
    from vla_rl.models.openvla_oft.fine_tuning import tiny_policy, with_statistics

    found = compute_statistics(episodes) if config.statistics == "data" else None
    if config.checkpoint is None:
        policy: VlaPolicy = tiny_policy(
            config.tiny_head, found, seed=derive_seed(config.seed, "policy")
        )
        policy.network.to(choose_device(config.device))
    else:
        require_openvla(config.checkpoint)
        folder = config.open_checkpoint(config.checkpoint)
        if found is not None:
            # under a name of their own, so that the checkpoint still acts in the robots that it was
            # made for
            key = config.norm_key or Path(config.demonstrations).name
            folder, config = (
                with_statistics(folder, found, key),
                msgspec.structs.replace(config, norm_key=key),
            )
        seed = derive_seed(config.seed, "new parts")
        policy = load_openvla(folder, config, config.device, config.new_parts, seed)
    if config.lora_rank is None:
        return policy
    from vla_rl.models.prismatic.config import LoraConfig

    lora = LoraConfig(rank=config.lora_rank, alpha=config.lora_alpha, targets=config.lora_targets)
    return policy.adapted(lora, seed=derive_seed(config.seed, "adapters"))


def training_images(config: SftLiberoConfig) -> "TrainingImages | None":
    """Return what the demonstrations show; None for data sets that were not recorded here.

    Raises: ConfigError if they show images of several kinds.
    """
    from vla_rl.models.prismatic.config import TrainingImages

    try:
        settings = read_image_settings(Path(config.demonstrations))
    except DataError as error:
        raise ConfigError(str(error)) from error
    if settings is None:
        return None
    assets = Path(settings["assets"] or "")
    # recordings of another machine name a folder that is not here
    is_known = bool(settings["assets"]) and assets.is_dir()
    kind = PLACEHOLDER_ASSETS if are_placeholders(assets) else "own"
    return TrainingImages(
        image_size=settings["image_size"],
        quality=settings["quality"],
        assets=kind if is_known else None,
    )


async def main(command: Command[Launch, SftLiberoConfig]) -> int:
    """Train the policy and save it; return the exit status."""
    # torch takes seconds to import: `--help` and errors in options must not wait for it
    import torch

    from vla_rl.learner.imitation_backend import Preparation
    from vla_rl.models.blocks import COMPILATION_NOTICE
    from vla_rl.run import imitation

    config = command.config
    # before anything is read: hours later, a folder that exists would cost the whole training
    require_new_folder(*list_save_folders(config))
    episodes = await asyncio.to_thread(read_demonstrations, config)
    images = await asyncio.to_thread(training_images, config)
    policy = await asyncio.to_thread(starting_policy, config, episodes)
    # saved with the weights, because a policy that sees other images later fails without a word
    policy.config = msgspec.structs.replace(policy.config, training_images=images)
    if config.recompute_activations:
        policy.recompute_activations()
    if config.compile_blocks:
        policy.compile_blocks()
        print(COMPILATION_NOTICE)
    print(policy.describe())
    samples = imitation.Samples(episodes, policy)
    print(
        f"{len(samples)} samples of {len(episodes)} episodes; {config.updates} updates of "
        f"{config.batch}"
    )
    trained = sum(
        parameter.numel() for parameter in policy.network.parameters() if parameter.requires_grad
    )
    print(
        f"{trained} of {sum(parameter.numel() for parameter in policy.network.parameters())} "
        "parameters are trained"
    )
    if command.launch.dry_run:
        await asyncio.to_thread(samples.read_one_of_each_episode)
        print("everything that the command would read was found")
        return 0
    batches = None
    if config.augment:
        generator = torch.Generator().manual_seed(derive_seed(config.seed, "augmentation"))
        batches = TrainingBatches(
            imitation.augmented_batches(policy, config.augmentation, generator),
            Preparation(
                "vla_rl.run.imitation:seeded_batches", msgspec.to_builtins(config.augmentation)
            ),
        )
    async with engines.DeviceLane(config.torch_threads) as lane:
        return await fine_tune(
            policy, samples, config, lane, partial(_save_merged, policy), batches
        )


def _save_merged(policy: "VlaPolicy", folder: Path) -> None:
    """Write a checkpoint in the public layout, with adapters merged into the weights."""
    (policy.merged() if policy.config.lora is not None else policy).save(folder)


cli = partial(run_recipe, Launch, SftLiberoConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
