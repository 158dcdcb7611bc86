"""A checkpoint that does what its reinforcement learning needs: a head that was trained for tokens,
and statistics that are those of its robot.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vla_rl.cli.doctor.machine import CheckResult, Machine
from vla_rl.errors import ConfigError, VlaRlError

if TYPE_CHECKING:
    from vla_rl.models.prismatic.folder import PublicFolder

UNTRAINED_SHARE: Final = 0.85
"""Entropy of the action tokens, as a share of a uniform choice's, above which a head counts as
untrained. The shipped policy, half trained, has 0.61; random weights have 0.95 and more."""

NUM_LOOKS: Final = 4

LIBERO_REACH: Final = 0.5
"""LIBERO's actions reach from -1 to 1, and the 99th percentile of a displacement lies above 0.5 in
each of its data sets. Robots whose actions are metres have a few hundredths."""


def checkpoint_that_acts(machine: Machine) -> Iterable[CheckResult]:
    """Check a policy's statistics, and that its tokens were trained."""
    if machine.checkpoint is None:
        return
    from vla_rl.models.families import find_family
    from vla_rl.models.prismatic.folder import open_folder
    from vla_rl.models.tensor_reading import locate

    try:
        family = find_family(locate(machine.checkpoint))
        folder = open_folder(machine.checkpoint) if family is None else None
    except VlaRlError as error:
        yield _unreadable(machine.checkpoint, error)
        return
    if folder is None:
        yield from _loads(machine)
        return
    yield from _statistics(folder, machine)
    heads = list(_trained_for_numbers(folder, machine))
    yield from heads
    if heads:
        return
    from vla_rl.models.loading import count_weight_bytes

    size = count_weight_bytes(folder.all_files)
    if size > machine.load_gib * 2**30:
        yield CheckResult(
            f"{folder.path} has {size / 2**30:.1f} GiB of weights, and was not loaded",
            "Whether its head was ever trained for tokens was not checked",
            f"Add `--load-gib {math.ceil(size / 2**30)}`, which loads it and asks it for actions",
            "warning",
        )
        return
    yield from _asked_for_actions(folder, machine)


def _loads(machine: Machine) -> Iterable[CheckResult]:
    """Load a policy of another family than OpenVLA's, if it is small enough."""
    from vla_rl.models.loading import count_weight_bytes, list_files, load_policy
    from vla_rl.models.prismatic.conventions import CheckpointFormat

    checkpoint = str(machine.checkpoint)
    size = count_weight_bytes(list_files(checkpoint))
    if size > machine.load_gib * 2**30:
        yield CheckResult(
            f"{checkpoint} has {size / 2**30:.1f} GiB of weights, and was not loaded",
            "Whether a run can load it was not checked",
            f"Add `--load-gib {math.ceil(size / 2**30)}`, which loads it",
            "warning",
        )
        return
    try:
        load_policy(checkpoint, CheckpointFormat(policy_family=machine.policy_family), "cpu")
    except VlaRlError as error:
        yield _unreadable(checkpoint, error)


def _trained_for_numbers(folder: "PublicFolder", machine: Machine) -> Iterable[CheckResult]:
    """Find a folder that would be read as tokens although it was trained for numbers."""
    from vla_rl.models.loading import find_action_head, read_family

    head = find_action_head(folder)
    try:
        family = read_family(folder) if machine.policy_family == "auto" else machine.policy_family
    except ConfigError as error:
        yield _unreadable(str(folder.path), error)
        return
    was_l1 = head is not None or folder.extension.head in ("l1", "diffusion")
    if family != "continuous" and was_l1:
        named = "its vla_rl.json says so" if head is None else f"{head.name} lies beside it"
        yield CheckResult(
            f"{folder.path} was trained with an L1 or diffusion head ({named}), and is read as "
            f"{family}, which chooses tokens",
            "Its head for tokens was never trained: token RL on it scores 0 % for as long as it runs",
            "Set --policy-family continuous, or fine-tune it for tokens first (`vla-rl sft_libero`)",
        )


def _asked_for_actions(folder: "PublicFolder", machine: Machine) -> Iterable[CheckResult]:
    from vla_rl.models.loading import load_policy
    from vla_rl.models.prismatic.conventions import CheckpointFormat

    format = CheckpointFormat(policy_family=machine.policy_family, norm_key=machine.norm_key)
    try:
        policy = load_policy(folder, format, "cpu")
    except VlaRlError as error:
        yield _unreadable(str(folder.path), error)
        return
    if getattr(policy.config, "head", "tokens") != "tokens":
        return
    share = entropy_share(policy)
    if share > UNTRAINED_SHARE:
        yield CheckResult(
            f"{folder.path} chooses action tokens almost at random: their entropy is "
            f"{share:.2f} of a uniform choice's",
            "Its head was never trained for tokens: token RL on it scores 0 % for as long as it runs",
            "Start from a checkpoint that was fine-tuned for tokens, or do so (`vla-rl sft_libero`)",
        )


def entropy_share(policy: Any) -> float:
    """Return the mean entropy of action tokens, of a policy that has them, on images of noise, as a share of a
    uniform choice's.
    """
    import numpy as np
    import torch

    from vla_rl.models.example_inputs import example_observation

    config = policy.config
    # noise, because no data set is at hand: an untrained head is at random on any image
    seen = [example_observation(policy, seed) for seed in range(NUM_LOOKS)]
    observations = [observation for observation in seen if observation is not None]
    actions = np.zeros((NUM_LOOKS, config.chunk_size, config.action_dim), np.float32)
    tokens = torch.from_numpy(policy.encode(actions))
    with torch.no_grad():
        batch = policy.prepare(observations)
        _, entropies = policy.log_probs(batch, tokens, torch.ones(NUM_LOOKS))
    return float(entropies.mean()) / math.log(config.num_bins)


def _statistics(folder: "PublicFolder", machine: Machine) -> Iterable[CheckResult]:
    from vla_rl.models.prismatic.statistics import choose_key, read_statistics

    try:
        key = choose_key(
            folder.statistics, machine.norm_key or folder.extension.norm_key, folder.path
        )
        chosen = folder.statistics[key].action
    except VlaRlError as error:
        yield CheckResult(
            str(error).rstrip("."),
            "The policy cannot be loaded: with another set its actions would be scaled for another "
            "robot, without an error",
            "Name the set with --norm-key, or add the `dataset_statistics.json` of its training",
        )
        return
    in_config = read_statistics((Path("/nonexistent"),), folder.public.norm_stats).get(key)
    if in_config is not None and in_config.action != chosen:
        yield CheckResult(
            f"the statistics {key!r} of dataset_statistics.json and config.json differ in "
            f"{folder.path}",
            "Only the former are used; if they are not those of its training, every action is "
            "scaled wrongly",
            "Keep the one that the policy was trained with",
        )
    low, high, mask = chosen.q01 or chosen.min, chosen.q99 or chosen.max, chosen.mask
    if low is None or high is None:
        return
    scaled = mask or (True,) * len(low)
    reach = [
        max(abs(a), abs(b)) for a, b, is_scaled in zip(low, high, scaled, strict=False) if is_scaled
    ]
    # actions are scaled by this range
    if any(a >= b for a, b, is_scaled in zip(low, high, scaled, strict=False) if is_scaled):
        yield CheckResult(
            f"the statistics {key!r} have a dimension without range (q01 >= q99) in {folder.path}",
            "The policy cannot move in it",
            "Use the statistics of the policy's own training set",
        )
    elif reach and max(reach[:3]) < LIBERO_REACH:
        yield CheckResult(
            f"the statistics {key!r} scale displacements to at most {max(reach[:3]):.3f}, and "
            f"LIBERO's reach 1, in {folder.path}",
            "On LIBERO the arm would hardly move: they are those of another robot",
            "Choose the set of LIBERO's suite with --norm-key; ignore this for other robots",
        )


def _unreadable(checkpoint: str, error: VlaRlError) -> CheckResult:
    return CheckResult(
        f"{checkpoint} cannot be used: {str(error).rstrip('.')}",
        "Recipes that start from it are refused",
        "Follow the error's remedy",
    )
