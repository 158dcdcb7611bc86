"""The word in the prompt by which a flow policy acts better than its data (RECAP), with guidance.

    training   "push the plate Advantage: negative"      the label that a stored step got, dropped at times
    acting     "push the plate Advantage: positive"      v = v_plain + guidance (v_positive - v_plain)

RECAP (pi*0.6), arXiv:2511.14759: what a policy learnt from data of all kinds, it can be asked for the
better part of. A guidance of 1 needs no second pass.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor

from vla_rl.algorithms.off_policy import guide
from vla_rl.models.flow.network import Prefix
from vla_rl.types import Observation

LABELS: Final[Mapping[bool, str]] = MappingProxyType(
    {True: " Advantage: positive", False: " Advantage: negative"}
)
"""Ends of instructions, by whether the step was better than expected."""


def label_instruction(instruction: str, is_positive: bool) -> str:
    """Return an instruction that ends with a label; one that it has is replaced."""
    return drop_label(instruction) + LABELS[is_positive]


def drop_label(instruction: str) -> str:
    """Return an instruction without its label, if it has one."""
    for label in LABELS.values():
        instruction = instruction.removesuffix(label)
    return instruction


def relabel(observation: Observation, label: bool | None) -> Observation:
    """Return an observation whose instruction has this label; None: without any."""
    words = observation.get("instruction")
    if not isinstance(words, str):
        return observation  # the processor's error names what is wrong
    labelled = drop_label(words) if label is None else label_instruction(words, label)
    return {**observation, "instruction": labelled}


def predict_velocity(
    network: Any, prefix: Prefix, x: Tensor, time: Tensor, guidance: float | None
) -> Tensor:
    """Return the velocity, float32 [N, H, P], guided if the prefix carries a plain one.

    Args:
        network: a `FlowNetwork`.
        prefix: of N observations.
        x: float32 [N, H, P], states of the chain.
        time: float32 [N].
        guidance: weight of the label; read only with a plain prefix.
    """
    velocity: Tensor = network.velocity(prefix, x, time)
    if prefix.plain is None or guidance is None:
        return velocity
    return guide(velocity, network.velocity(prefix.plain, x, time), guidance)
