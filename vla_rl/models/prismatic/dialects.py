"""Conventions by which systems that share OpenVLA's architecture differ.

A checkpoint works only under the conventions of its training, and its files do not say which these are.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.images.names import ImagePipelineName

Dialect: TypeAlias = Literal[
    "openvla_oft", "simplevla", "simplevla_robotwin", "rlinf", "rlinf_official", "rlinf_robotwin"
]
"""Project, and simulator if that matters, whose conventions a checkpoint was trained with."""


class Conventions(NamedTuple):
    """Settings that a dialect decides."""

    images: ImagePipelineName
    has_stop_token: bool
    rope_inv_freq_dtype: Literal["float32", "bfloat16"]


DIALECTS: Final[Mapping[Dialect, Conventions]] = {
    "openvla_oft": Conventions("exact", True, "float32"),
    "simplevla": Conventions("exact", True, "float32"),
    "simplevla_robotwin": Conventions("crop", True, "float32"),
    "rlinf": Conventions("bicubic_float", False, "bfloat16"),
    "rlinf_official": Conventions("bicubic_pillow", True, "bfloat16"),
    "rlinf_robotwin": Conventions("crop", True, "bfloat16"),
}
"""`openvla_oft` is the authors' evaluation in LIBERO. SimpleVLA-RL, siiRL and SRPO (`simplevla`) agree with it there; in
RoboTwin they crop the simulator's frame and do nothing else to it, and so does RLinf, with its version `official`."""


def conventions_of(
    folder: Path, known: Conventions | None, asked: Dialect | None, *, has_placeholders: bool = True
) -> Conventions:
    """Return the conventions that a checkpoint was saved with here, else those of a dialect, else OpenVLA's own.

    Without placeholders, as OpenVLA decides, there is no stop token behind them to differ by.

    Raises: ConfigError for an unknown dialect; CheckpointError if the checkpoint was saved with other conventions than
    those asked for.
    """
    if asked is not None and asked not in DIALECTS:
        raise ConfigError(f"dialect is {asked!r}, expected one of {', '.join(DIALECTS)}")
    wanted = None if asked is None else DIALECTS[asked]
    if known is not None and wanted is not None and not has_placeholders:
        known = known._replace(has_stop_token=wanted.has_stop_token)
    if known is not None and wanted not in (None, known):
        raise CheckpointError(
            f"{folder} acts by {known}, which is not the dialect {asked!r}: it was saved here, and knows. Leave the "
            "dialect out."
        )
    return known or wanted or DIALECTS["openvla_oft"]
