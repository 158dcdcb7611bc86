"""Where systems that share OpenVLA's architecture differ: a checkpoint works only under the conventions of its training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.images.names import ImagePipelineName

Dialect: TypeAlias = Literal["openvla_oft", "simplevla", "rlinf", "rlinf_official"]
"""Whose conventions a checkpoint was trained with, where systems that share the architecture differ."""


class Conventions(NamedTuple):
    """What a dialect settles."""

    images: ImagePipelineName
    has_stop_token: bool
    rope_inv_freq_dtype: Literal["float32", "bfloat16"]


DIALECTS: Final[Mapping[Dialect, Conventions]] = {
    "openvla_oft": Conventions("exact", True, "float32"),
    "simplevla": Conventions("exact", True, "float32"),
    "rlinf": Conventions("bicubic", False, "bfloat16"),
    "rlinf_official": Conventions("bicubic", True, "bfloat16"),
}
"""`openvla_oft` is the authors' evaluation; SimpleVLA-RL, siiRL and SRPO ("simplevla") agree with it."""


def conventions_of(
    folder: Path, known: Conventions | None, asked: Dialect | None, *, has_placeholders: bool = True
) -> Conventions:
    """What a checkpoint that was saved here knows, else those of a dialect, else OpenVLA's own.

    Without placeholders, as OpenVLA decides, there is no stop token behind them to differ by.

    Raises: ConfigError for an unknown dialect; CheckpointError where another is asked for than the checkpoint knows.
    """
    if asked is not None and asked not in DIALECTS:
        raise ConfigError(f"dialect is {asked!r}, expected one of {', '.join(DIALECTS)}")
    wanted = None if asked is None else DIALECTS[asked]
    if known is not None and wanted is not None and not has_placeholders:
        known = known._replace(has_stop_token=wanted.has_stop_token)
    if known is not None and wanted not in (None, known):
        raise CheckpointError(
            f"{folder} acts by {known}, which is not the dialect {asked!r}: it was saved here, and knows."
        )
    return known or wanted or DIALECTS["openvla_oft"]
