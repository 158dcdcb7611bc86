"""A new small flow policy: its sizes by options, all else by the data that it is to be fine-tuned on."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from vla_rl.datasets import RecordedEpisode, compute_statistics
from vla_rl.errors import ConfigError, DataError
from vla_rl.models.loading import Device, choose_device
from vla_rl.types import Config, NonNegativeFloat, PositiveInt

if TYPE_CHECKING:
    from vla_rl.models.flow.policy import FlowPolicy
    from vla_rl.models.prismatic.action_tokens import ActionBounds

MOST_PATCHES: Final = 64
"""Patches of an image of a new policy, at most, if their size is not set."""


class NewPolicyConfig(Config, frozen=True, kw_only=True):
    """Sizes of a new small flow policy; cameras, image size, state and actions follow from the data."""

    horizon: PositiveInt = 8
    """Control steps of a chunk; all are executed before the next decision."""

    depth: PositiveInt = 3
    """Layers that read images and instruction, and as many of the expert."""

    width: PositiveInt = 192
    """Width of the layers that read; a multiple of 4."""

    expert_width: PositiveInt = 128
    """Width of the expert; even."""

    patch_size: PositiveInt | None = None
    """Pixels along a side of a patch: a multiple of 4 that divides the image. None: the smallest with at
    most 64 patches."""

    num_steps: PositiveInt = 4
    """Steps from noise to actions, in acting and in later training by reinforcement learning."""

    noise_level: NonNegativeFloat = 0.3
    """Noise of the one stochastic step, in later training by reinforcement learning."""


def make_new_policy(
    sizes: NewPolicyConfig, episodes: Sequence[RecordedEpisode], seed: int, device: Device
) -> "FlowPolicy":
    """Make a policy with random weights, which are drawn from the seed.

    Raises: DataError for data without images, or with images that are no squares of one size; ConfigError
        for sizes that do not fit them.
    """
    from vla_rl.models.flow.config import FlowSampling
    from vla_rl.models.flow.small import SmallFlowConfig, StateConfig
    from vla_rl.models.flow.small_folder import create_small_flow

    first = episodes[0]
    cameras = tuple(sorted(first.frames))
    if not cameras:
        raise DataError(
            f"{first.name} has no images, and a flow policy acts by images; use other data."
        )
    shapes = {camera: first.frames[camera](0).shape for camera in cameras}
    height, width, _ = shapes[cameras[0]]
    if len(set(shapes.values())) > 1 or height != width:
        raise DataError(
            f"{first.name} has images of {shapes}, expected squares of one size for a new policy; resize them."
        )
    found, states = describe_data(episodes), None
    if "state" in found:
        # a number that never changes is passed on as 0, not divided by 0
        spread = [value or 1.0 for value in found["state"]["std"]]
        states = StateConfig(mean=tuple(found["state"]["mean"]), std=tuple(spread))
    network = SmallFlowConfig(
        actions=_bound_actions(found["action"]),
        state=states,
        cameras=cameras,
        image_size=height,
        patch_size=sizes.patch_size or _choose_patch(height),
        horizon=sizes.horizon,
        depth=sizes.depth,
        width=sizes.width,
        expert_width=sizes.expert_width,
    )
    sampling = FlowSampling(num_steps=sizes.num_steps, noise_level=sizes.noise_level)
    policy = create_small_flow(network, seed, sampling)
    policy.network.to(choose_device(device))
    return policy


def describe_data(episodes: Sequence[RecordedEpisode]) -> dict[str, dict[str, list[float]]]:
    """Return the statistics of `action` and, if all episodes have it, `state`, in the data's own units."""
    # a gripper is a number like the others here: flow policies scale it too, and keep its sign
    plain = [msgspec.structs.replace(episode, has_gripper=False) for episode in episodes]
    found = compute_statistics(plain)
    named = {"action": found["action"], "state": found.get("proprio")}
    return {
        name: {field: values for field, values in each.items() if field != "mask"}
        for name, each in named.items()
        if each is not None
    }


def _bound_actions(statistics: Mapping[str, list[float]]) -> "ActionBounds":
    from vla_rl.models.prismatic.action_tokens import ActionBounds

    low, high = statistics["q01"], statistics["q99"]
    return ActionBounds(low=tuple(low), high=tuple(high), is_scaled=(True,) * len(low))


def _choose_patch(image_size: int) -> int:
    sizes = [size for size in range(4, image_size + 1, 4) if image_size % size == 0]
    fitting = [size for size in sizes if (image_size // size) ** 2 <= MOST_PATCHES]
    if not fitting:
        raise ConfigError(
            f"images have {image_size} pixels, which no multiple of 4 divides, expected such as 84 or 128; "
            "resize them"
        )
    return fitting[0]
