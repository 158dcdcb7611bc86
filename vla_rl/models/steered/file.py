"""Contents of a head's `config.json`: its settings and sizes, and which base it belongs to."""

from typing import Final

import msgspec

from vla_rl.models.steered.config import BaseSource, SteeringConfig
from vla_rl.models.steered.heads import HeadSizes
from vla_rl.types import Config

MODEL_TYPE: Final = "vla_rl_steered"


class SteeredFile(Config, frozen=True, kw_only=True):
    """Contents of `config.json`."""

    steering: SteeringConfig
    """Settings of the head."""

    sizes: HeadSizes
    """Numbers that it reads and chooses."""

    base_digest: str
    """SHA-256 of the base, as `compute_base_digest` returns it."""

    base: BaseSource | None = None
    """Folder of the base; none if it was made in the process that saved the head."""

    model_type: str = MODEL_TYPE
    """Name of the format."""

    def __post_init__(self) -> None:
        self.require(self.model_type == MODEL_TYPE, "model_type", repr(MODEL_TYPE))

    def encode(self) -> bytes:
        """Return the file's text."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)
