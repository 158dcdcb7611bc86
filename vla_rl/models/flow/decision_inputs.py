"""Inputs of decisions: their observations, what stored ones have drawn, plans that they continue."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from vla_rl.engines.device_lane import to_device
from vla_rl.engines.policy_model import SampledTokens
from vla_rl.models.flow.advantage_prompt import relabel
from vla_rl.models.flow.config import FlowPolicyConfig
from vla_rl.models.flow.network import FlowInputs, FlowProcessor
from vla_rl.models.flow.prefix_cache import PrefixCache
from vla_rl.models.flow.real_time import weigh_plan
from vla_rl.types import Observation
from vla_rl.types.observation import DELAY_KEY, DRAWN_KEY, PLANNED_KEY


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


EXAMPLE_INSTRUCTION: Final = "pick up the black bowl and place it on the plate"

STORED: Final = ("state_before", "step", "velocity", "end", "noise", "time")
"""Names of the arrays in `drawn`."""


def add_stored_steps(
    inputs: FlowInputs, observations: Sequence[Observation], device: torch.device
) -> FlowInputs:
    """Add what stored decisions have drawn, if it is there.

    Raises: ValueError if only some have `drawn`.
    """
    drawn = [each[DRAWN_KEY] for each in observations if DRAWN_KEY in each]
    if not drawn:
        return inputs
    if len(drawn) < len(observations):
        raise ValueError(
            f"{len(drawn)} of {len(observations)} observations have {DRAWN_KEY!r}, expected all or none"
        )
    given: dict[str, Any] = {
        name: to_device(torch.from_numpy(np.stack([each[name] for each in drawn])), device)
        for name in STORED
        if name in drawn[0]
    }
    return replace(inputs, **given)


def check_stored_step(
    drawn: Mapping[str, np.ndarray] | None, shape: tuple[int, int], num_kept: int
) -> None:
    """Check what a decision has drawn, before it is scored.

    Args:
        drawn: the decision's.
        shape: H and P of the policy.
        num_kept: number of steps that can be a decision's own.

    Raises: ValueError for what is missing or impossible.
    """
    if drawn is None or not {"state_before", "step"} <= set(drawn):
        raise ValueError(
            "`drawn` has no state_before and step, expected both: the decision is of another family, or "
            "was recorded by a version that did not store them; record it anew"
        )
    given = drawn["state_before"].shape
    if given != shape:
        raise ValueError(
            f"`drawn` has a state_before {list(given)}, expected {list(shape)}; the decision is of "
            "another policy"
        )
    step = int(drawn["step"])
    if not 0 <= step < num_kept:
        raise ValueError(
            f"`drawn` has step {step}, expected 0 to {num_kept - 1}: a greedy decision, or one that continues "
            "a plan (-1), has no density, and another number belongs to a chain of other num_steps"
        )


def make_example(
    config: FlowPolicyConfig, image_size: int, shape: tuple[int, int], seed: int
) -> Observation:
    """Return an observation of noise that a policy can act on and score.

    Args:
        config: facts about the policy.
        image_size: pixels along a side of its images.
        shape: H and P of the policy.
        seed: draws the noise.
    """
    random = np.random.default_rng(seed)
    seen: Observation = {
        camera: random.integers(0, 256, (image_size, image_size, 3), dtype=np.uint8)
        for camera in config.cameras
    }
    if config.state_size is not None:
        seen["state"] = np.zeros(config.state_size, np.float32)
    before = random.normal(size=shape).astype(np.float32)
    step = np.array(seed % config.sampling.num_steps)
    return {
        **seen,
        "instruction": EXAMPLE_INSTRUCTION,
        DRAWN_KEY: {"state_before": before, "step": step},
    }


def add_origins(
    inputs: FlowInputs,
    observations: Sequence[Observation],
    processor: FlowProcessor,
    device: torch.device,
) -> FlowInputs:
    """Add what actions are offsets from, if they are, as a shift of the network's numbers.

    Raises: ValueError for an observation that does not suit the policy.
    """
    origins = processor.action_origins(observations)
    if origins is None:
        return inputs
    scaled = processor.normalise_actions(np.stack([origins, np.zeros_like(origins)]))
    return replace(inputs, origins=to_device(torch.from_numpy(scaled[0] - scaled[1]), device))


def add_to_chunk(sampled: SampledTokens, origins: Tensor | None) -> SampledTokens:
    """Add what actions are offsets from, float32 [N, D], to each row of the chunks, if they are offsets."""
    if origins is None or sampled.chunk is None:
        return sampled
    rows = sampled.chunk.reshape(len(origins), -1, origins.shape[1])
    return replace(sampled, chunk=(rows + origins[:, None]).flatten(1))


def add_plans(
    inputs: FlowInputs,
    observations: Sequence[Observation],
    processor: FlowProcessor,
    shape: tuple[int, int],
    device: torch.device,
) -> FlowInputs:
    """Add the plans that decisions have to continue, if any decision has one.

    Args:
        inputs: of the observations.
        observations: N of them.
        processor: converts planned actions.
        shape: H and P of the policy.
        device: where the inputs are.

    Raises: ValueError for a plan of another shape, a delay without a plan, or one that the plan does
        not last.
    """
    if not any(PLANNED_KEY in each or DELAY_KEY in each for each in observations):
        return inputs
    planned = np.zeros((len(observations), *shape), np.float32)
    origins = processor.action_origins(observations)
    weight = np.zeros_like(planned)
    width = processor.action_dim
    for row, each in enumerate(observations):
        if PLANNED_KEY not in each and DELAY_KEY not in each:
            continue
        actions, delay = _read_plan(each, shape[0], width)
        if origins is not None:
            actions = actions - origins[row]
        planned[row, : len(actions), :width] = processor.normalise_actions(actions[None])[0]
        weight[row, :, :width] = weigh_plan(len(actions), delay, shape[0])[:, None]
    return replace(
        inputs,
        planned=to_device(torch.from_numpy(planned), device),
        plan_weight=to_device(torch.from_numpy(weight), device),
    )


def _read_plan(observation: Observation, horizon: int, width: int) -> tuple[np.ndarray, int]:
    """Return the planned actions [R, D] and the delay. Raises: ValueError."""
    actions, delay = observation.get(PLANNED_KEY), observation.get(DELAY_KEY)
    if (
        not isinstance(actions, np.ndarray)
        or actions.ndim != 2
        or not 1 <= len(actions) <= horizon
        or actions.shape[1] != width
        or not np.isfinite(actions).all()
    ):
        given = list(actions.shape) if isinstance(actions, np.ndarray) else type(actions).__name__
        raise ValueError(
            f"observation[{PLANNED_KEY!r}] is {given}, expected finite actions [1 to {horizon}, {width}]: the "
            "rows of the previous chunk from now on"
        )
    number = (
        delay.item() if isinstance(delay, np.ndarray | np.generic) and delay.size == 1 else delay
    )
    if isinstance(number, bool) or not isinstance(number, int | float) or number != int(number):
        raise ValueError(
            f"observation[{DELAY_KEY!r}] is {delay!r}, expected the whole number of control steps that pass "
            "while the policy decides"
        )
    if not 0 <= number <= len(actions):
        raise ValueError(
            f"observation[{DELAY_KEY!r}] is {int(number)}, expected 0 to {len(actions)}, the rows of the plan: "
            "the robot would have nothing to run; decide sooner, or execute fewer rows of a chunk"
        )
    return actions, int(number)
