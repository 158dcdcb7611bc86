"""Rows of the replay buffer as tensors on the learner's device."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from vla_rl.algorithms.off_policy import bootstrap_discounts, chunk_returns
from vla_rl.engines.device_lane import to_device
from vla_rl.learner.off_policy.config import OffPolicyConfig
from vla_rl.replay import TransitionLayout

STATE: Final = ("features", "proprio", "reference")


@dataclass(frozen=True)
class State:
    """Inputs of a head at N decisions, float32."""

    features: Tensor
    """[N, Z]."""

    proprio: Tensor
    """[N, P]."""

    reference: Tensor
    """[N, A], the base's own action; zeros for heads without one."""


@dataclass(frozen=True)
class Batch:
    """N transitions. Numbers are float32 and flags are bool, on one device."""

    state: State
    action: Tensor
    """[N, A], what was executed."""

    reward: Tensor
    """[N], rewards of the chunk's executed control steps, discounted to its first."""

    discount: Tensor
    """[N], factor of the next state's value: gamma ** executed steps."""

    terminated: Tensor
    """bool [N], where no value follows."""

    next_state: State
    intervened: Tensor
    """bool [N, C], control steps that an expert or a person chose; [N, 1] for heads that choose no
    control steps."""

    expert_action: Tensor
    """[N, A], where `has_expert`."""

    has_expert: Tensor
    """bool [N]."""

    return_to_go: Tensor
    """[N], undiscounted."""

    versions: np.ndarray
    """int64 [N] on the host, weight version of the head that acted."""

    def __len__(self) -> int:
        return len(self.reward)


def make_batch(
    rows: np.ndarray, layout: TransitionLayout, config: OffPolicyConfig, device: torch.device
) -> Batch:
    """Copy rows to the device.

    Args:
        rows: of `layout.row_dtype`.
        layout: sizes of the rows.
        config: gamma, and whether values go on behind a limit.
        device: device of the networks.
    """

    def floats(values: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(values, np.float32)), device)

    def flags(values: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(values)), device)

    intervened: np.ndarray = rows["intervened"]
    if layout.kind != "residual":
        intervened = np.any(intervened, axis=1, keepdims=True)
    lengths = torch.from_numpy(np.array(rows["num_rewards"], np.int64))
    # on the host, where checking the lengths does not wait for the device
    reward = chunk_returns(torch.from_numpy(np.array(rows["rewards"])), lengths, gamma=config.gamma)
    discount = bootstrap_discounts(lengths, gamma=config.gamma)
    ended = rows["terminated"] if config.bootstrap else rows["terminated"] | rows["truncated"]
    state, next_state = (
        State(*(floats(rows[f"{prefix}{name}"]) for name in STATE)) for prefix in ("", "next_")
    )
    return Batch(
        state=state,
        action=floats(rows["action"]),
        reward=to_device(reward, device),
        discount=to_device(discount, device),
        terminated=flags(ended),
        next_state=next_state,
        intervened=flags(intervened),
        expert_action=floats(rows["expert_action"]),
        has_expert=flags(rows["has_expert"]),
        return_to_go=floats(rows["return_to_go"]),
        versions=np.array(rows["head_version"]),
    )


@dataclass(frozen=True)
class StepRows:
    """The rows of one gradient step."""

    critic: Batch
    actor: Batch | None
    """None: the buffer has no row that this actor learns from yet."""


def make_step_rows(
    rows: np.ndarray,
    actor_rows: np.ndarray | None,
    *,
    layout: TransitionLayout,
    config: OffPolicyConfig,
    device: torch.device,
    has_own: bool,
) -> StepRows:
    """Copy the rows of a gradient step to the device.

    Args:
        rows: the critic's.
        actor_rows: the actor's own, if there are some.
        layout, config, device: as in `make_batch`.
        has_own: whether the actor reads rows of its own, and not the critic's.
    """
    critic = make_batch(rows, layout, config, device)
    if not has_own:
        return StepRows(critic, critic)
    own = None if actor_rows is None else make_batch(actor_rows, layout, config, device)
    return StepRows(critic, own)
