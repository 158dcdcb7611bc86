"""Inputs of a flow policy from observations: equal ones once, and labelled ones for a policy that acts by a label."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from vla_rl.engines.device_lane import to_device
from vla_rl.models.flow.advantage_prompt import relabel
from vla_rl.models.flow.network import FlowInputs, FlowProcessor
from vla_rl.models.flow.prefix_cache import PrefixCache
from vla_rl.types import Observation


def prepare_inputs(
    processor: FlowProcessor,
    prefixes: PrefixCache,
    observations: Sequence[Observation],
    guidance: float | None,
    device: torch.device,
) -> FlowInputs:
    """Prepare observations, as the policy acts on them.

    Args:
        processor: prepares each.
        prefixes: those that are kept.
        observations: N of them.
        guidance: None: as they are. 1: with "Advantage: positive" at the end of the instruction. Above 1:
            so, and without any label as `plain`.
        device: where the inputs go.

    Raises: ValueError for observations that do not suit the policy.
    """
    if guidance is None:
        return _prepare_once(processor, prefixes, observations, device)
    positive, plain = ([relabel(each, label) for each in observations] for label in (True, None))
    inputs = _prepare_once(processor, prefixes, positive, device)
    if guidance == 1.0:
        return inputs
    return replace(inputs, plain=_prepare_once(processor, prefixes, plain, device))


def _prepare_once(
    processor: FlowProcessor,
    prefixes: PrefixCache,
    observations: Sequence[Observation],
    device: torch.device,
) -> FlowInputs:
    """Prepare equal observations once if that halves their number."""
    identities = [processor.identify(each) for each in observations]
    found: dict[tuple[object, ...], int] = {}
    rows = [found.setdefault(each, len(found)) for each in identities]
    is_halved = 2 * len(found) <= len(observations)
    chosen = [rows.index(row) for row in range(len(found))] if is_halved else range(len(rows))
    inputs = prefixes.prepare(
        processor,
        [observations[row] for row in chosen],
        [identities[row] for row in chosen],
        device,
    )
    return replace(inputs, rows=to_device(torch.tensor(rows), device)) if is_halved else inputs
