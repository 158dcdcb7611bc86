"""Seams between flow policies' networks, their processors, and the policy that samples and scores.

    observations ─► FlowProcessor.prepare ─► FlowInputs ─► FlowNetwork.embed_prefix ─► Prefix   once a decision
    Prefix, noised chunk, time ─► FlowNetwork.velocity ─► velocity                             K times a decision
    Prefix ─► FlowNetwork.features ─► a critic's value head

Time runs from 1 (noise) to 0 (actions): x_t = t * noise + (1 - t) * actions, and the network predicts
the velocity noise - actions (Lipman et al. 2023, arXiv:2210.02747; Black et al. 2024, arXiv:2410.24164).
Axes: B observations, N decisions, C cameras, L prefix tokens, H rows of a chunk, D numbers of the
robot's action, P >= D numbers of a padded action.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.engines.device_lane import to_device
from vla_rl.types import Observation


@dataclass(frozen=True)
class FlowInputs:
    """B observations, ready for a network, for N decisions.

    Attributes:
        images: float32 [B, C, 3, S, S] in [-1, 1].
        image_mask: bool [B, C]; False where a camera is missing.
        tokens: int64 [B, T]; ids of the prompt, padded to the right.
        token_mask: bool [B, T]; False for padding.
        state: float32 [B, P], normalised and padded with zeros.
        rows: int64 [N], the observation of each decision, if some share one; None if each has its
            own.
        state_before: float32 [N, H, P], the state of the chain before a stored decision's
            stochastic step; None while acting.
        step: int64 [N], the index of that step, 0 for the step that starts from noise.
        velocity: float32 [N, T], the counted part of the velocity in that step, as it acted.
        end: float32 [N, T], the counted part of the chain's end.
        noise: float32 [N, M, H, P], the M draws of noise that imitation uses; None: drawn.
        time: float32 [N, M], the times of those draws.
        planned: float32 [N, H, P], the plans that chunks continue; None if no decision has one.
        plan_weight: float32 [N, H, P], how strongly; 0 without a plan.
        origins: float32 [N, D], what is added to each row of a chunk, in the network's numbers; None: nothing.
        known: prefixes that need not be computed. Then `images` to `state` have a row for each of the
            other observations alone, which may be none.
        plain: the same observations without a label in the prompt, for guidance; None: no guidance.
    """

    images: Tensor
    image_mask: Tensor
    tokens: Tensor
    token_mask: Tensor
    state: Tensor
    rows: Tensor | None = None
    state_before: Tensor | None = None
    step: Tensor | None = None
    velocity: Tensor | None = None
    end: Tensor | None = None
    noise: Tensor | None = None
    time: Tensor | None = None
    planned: Tensor | None = None
    plan_weight: Tensor | None = None
    origins: Tensor | None = None
    known: "KnownPrefixes | None" = None
    plain: "FlowInputs | None" = None

    def to(self, device: torch.device) -> Self:
        """Return the same inputs on a device."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        moved: dict[str, Any] = {
            name: to_device(value, device) for name, value in named if isinstance(value, Tensor)
        }
        plain = None if self.plain is None else self.plain.to(device)
        return replace(self, **moved, plain=plain)

    def with_known(self, known: "KnownPrefixes") -> Self:
        """Return the inputs of observations some of whose prefixes are known, given those of the others;
        if all are known, given inputs of any one.
        """
        if not all(known.found):
            return replace(self, known=known)
        return replace(
            self,
            images=self.images[:0],
            image_mask=self.image_mask[:0],
            tokens=self.tokens[:0],
            token_mask=self.token_mask[:0],
            state=self.state[:0],
            known=known,
        )


@dataclass(frozen=True)
class Prefix:
    """The part of a network's work that depends on B observations alone; every step of a chain attends
    to it.

    Attributes:
        keys: for each layer, [B, heads, L, head size], after the rotary embedding.
        values: for each layer, [B, heads, L, head size].
        mask: bool [B, L]; False for padding and for tokens of missing cameras.
        positions: int64 [B, L]; they count unmasked tokens only, so the chunk's tokens go on from
            the number of unmasked ones in each row.
        output: [B, L, width], after the last norm.
        state: float32 [B, P], for networks whose state token belongs to the chunk.
        plain: the prefix of the same observations without a label, for guidance; None: no guidance.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    mask: Tensor
    positions: Tensor
    output: Tensor
    state: Tensor
    plain: "Prefix | None" = None

    def rows(self, index: Tensor) -> "Prefix":
        """Return the rows at `index`, int64 [N]; a row can be repeated."""
        return Prefix(
            tuple(layer[index] for layer in self.keys),
            tuple(layer[index] for layer in self.values),
            self.mask[index],
            self.positions[index],
            self.output[index],
            self.state[index],
            None if self.plain is None else self.plain.rows(index),
        )

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors, in bytes."""
        rest = (self.mask, self.positions, self.output, self.state)
        tensors = (*self.keys, *self.values, *rest)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class PrefixRow(NamedTuple):
    """One row of a prefix, which may be that of other observations."""

    prefix: Prefix
    row: int


class KnownPrefixes(NamedTuple):
    """Prefixes that are known, of B observations.

    Attributes:
        names: a name for each, equal for observations that the network sees alike.
        found: the prefix of each; None if it has to be computed.
    """

    names: tuple[bytes, ...]
    found: tuple[PrefixRow | None, ...]


class FlowNetwork(Protocol):
    """A network that predicts velocities; an implementation is an `nn.Module` too.

    A row's result depends on its own inputs alone: not on the other rows, nor on padding.
    """

    @property
    def horizon(self) -> int:
        """Rows of a chunk, H."""
        ...

    @property
    def action_dim(self) -> int:
        """Width of a padded action, P."""
        ...

    @property
    def feature_size(self) -> int:
        """Width of `features`."""
        ...

    def prefix_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that `embed_prefix` computes with."""
        ...

    def embed_prefix(self, inputs: FlowInputs) -> Prefix:
        """Compute what depends on the B observations alone: images, prompt, state."""
        ...

    def velocity(self, prefix: Prefix, x: Tensor, time: Tensor) -> Tensor:
        """Predict noise - actions, float32 [N, H, P].

        Args:
            prefix: N rows.
            x: float32 [N, H, P], noised chunks.
            time: float32 [N] in [0, 1].
        """
        ...

    def features(self, prefix: Prefix) -> Tensor:
        """Compute features of the observations alone, [B, feature_size], for a critic."""
        ...


class FlowProcessor(Protocol):
    """Conversions between a robot and a network; immutable, so any thread may use one."""

    @property
    def action_dim(self) -> int:
        """Numbers of the robot's action, D."""
        ...

    @property
    def camera_keys(self) -> tuple[str, ...]:
        """Observation keys of the images, without cameras that the robot does not have."""
        ...

    @property
    def image_size(self) -> int:
        """Pixels along each side of an image in the network."""
        ...

    @property
    def fixed_image_size(self) -> int | None:
        """Pixels along each side that images must have; None for any, which are resized."""
        ...

    @property
    def padded_dim(self) -> int | None:
        """Width to which a folder of another project pads actions; None for a policy made here."""
        ...

    @property
    def state_size(self) -> int | None:
        """Numbers of `observation["state"]`; None if it is not read."""
        ...

    @property
    def state_offsets(self) -> int:
        """First numbers of an action that are offsets from the state."""
        ...

    def prepare(self, observations: Sequence[Observation], device: torch.device) -> FlowInputs:
        """Prepare one row for each observation: `images` to `state`, nothing of a decision.

        Raises: ValueError naming the key of an observation that does not suit the policy.
        """
        ...

    def identify(self, observation: Observation) -> tuple[object, ...]:
        """Return a value that is equal for two observations only if `prepare` treats them alike."""
        ...

    def action_origins(self, observations: Sequence[Observation]) -> np.ndarray | None:
        """Return what is added to each action of a decision, float32 [N, D] in the environment's units; None for
        nothing. Raises: ValueError for an observation that does not suit the policy.
        """
        ...

    def normalise_actions(self, actions: np.ndarray) -> np.ndarray:
        """Convert actions [B, H, D] in the environment's units to the network's, float32."""
        ...

    def restore_actions(self, numbers: np.ndarray) -> np.ndarray:
        """Invert `normalise_actions`: from float32 [B, H, D] to the environment's units."""
        ...


class FlowLayout(Protocol):
    """A folder's file format: names of tensors, and the small files beside them."""

    def write_tensors(self, network: nn.Module) -> dict[str, Tensor]:
        """Return every parameter under its name in the folder; views, not copies."""
        ...

    def read_tensors(self, network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors with the folder's names into a network.

        Raises: CheckpointError listing missing, unknown and misshapen names.
        """
        ...

    def encode_files(self, sampling: Any) -> Mapping[str, bytes]:
        """Return the small files of the folder by name: configuration, statistics, processors, and the
        chain from noise to actions (`FlowSampling`).
        """
        ...


def embed_time(time: Tensor, width: int, min_period: float, max_period: float) -> Tensor:
    """Return sines and then cosines of a time, float64 [N, width].

    Periods grow geometrically from `min_period` to `max_period` (openpi, `create_sinusoidal_pos_embedding`).

    Args:
        time: [N], from 1 (noise) to 0 (actions).
        width: even width of the embedding.
        min_period, max_period: in units of time.
    """
    # in float64, because times of neighbouring steps differ less than a float32 phase resolves
    grows = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time.device)
    period = min_period * (max_period / min_period) ** grows
    phase = 2 * math.pi / period * time.double()[:, None]
    return torch.cat([phase.sin(), phase.cos()], -1)
