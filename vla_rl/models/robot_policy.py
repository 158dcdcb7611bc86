"""Protocols of policies that move a robot, whatever their family.

Beside the methods of `vla_rl.engines.PolicyModel`: which cameras and state it reads, how long its chunks are,
one line about itself, and a folder to save it to. A family may offer more, such as `adapted` for LoRA; a
recipe refuses the option of a method that a policy lacks (`families.require_method`).
"""

from pathlib import Path
from typing import Any, Protocol

from vla_rl.engines.policy_model import PolicyModel


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
