"""Protocols of policies that move a robot, whatever their family.

Beside the methods of `vla_rl.engines.PolicyModel`: which cameras and state it reads, how long its chunks are,
one line about itself, and a folder to save it to. A family may offer more; a recipe refuses the option of a
method that a policy lacks (`families.require_method`):

    adapted(lora, seed)                           the same policy with new LoRA adapters
    recompute_activations(), compile_blocks()     less memory, less time
    augmented_preparation(config, generator)      a `prepare` that changes frames at random, for `sft_libero`
    tensor_plan()                                 layers that ranks share
    vllm_form                                     `module:function` of the form that vLLM engines serve
    frozen_base                                   `module:Class` of the base that it is under a head
    trace_decision(observation, tokens)           `TracedValue`s, which `parity` compares
"""

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from vla_rl.engines.policy_model import PolicyModel


class TracedValue(NamedTuple):
    """A value on the way from an observation to an action.

    Attributes:
        boundary: its name among `vla_rl.evaluation.parity.BOUNDARIES`.
        value: the numbers.
        camera: key of the image that it comes from; empty for other values.
    """

    boundary: str
    value: np.ndarray
    camera: str = ""


class RobotConfig(Protocol):
    """Configuration of a policy that moves a robot, as far as recipes read it."""

    @property
    def cameras(self) -> tuple[str, ...]:
        """Observation keys of the images that it sees."""
        ...

    @property
    def state_size(self) -> int | None:
        """Numbers of the state that it reads; None if it reads none."""
        ...

    @property
    def chunk_size(self) -> int:
        """Control steps of a decision."""
        ...

    @property
    def action_dim(self) -> int:
        """Numbers of one control step."""
        ...


class RobotPolicy(PolicyModel[Any], Protocol):
    """A policy that moves a robot, of any family."""

    @property
    def config(self) -> RobotConfig:
        """Its configuration."""
        ...

    def describe(self) -> str:
        """Describe in one line how it acts, as its checkpoint was interpreted."""
        ...

    def save(self, folder: Path) -> None:
        """Write a checkpoint to a new folder, whole or not at all. Raises: CheckpointError."""
        ...
