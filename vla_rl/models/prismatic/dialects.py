"""Conventions that differ between systems with OpenVLA's architecture.

A checkpoint works only with the conventions of its training, and its files do not name them.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.images.names import ImagePipelineName

Dialect: TypeAlias = Literal[
    "openvla_oft", "simplevla", "simplevla_robotwin", "rlinf", "rlinf_official", "rlinf_robotwin"
]
"""Project, and simulator if that matters, whose conventions a checkpoint was trained with."""


Vocabulary: TypeAlias = Literal["all", "actions"]
"""Token ids over which OpenVLA normalises an action token's probability: all ids, or the ids of the
action bins only."""


class Conventions(NamedTuple):
    """Settings of a dialect.

    A family without a stop token, or without a choice of vocabulary, ignores that setting.
    """

    images: ImagePipelineName
    has_stop_token: bool
    rope_inv_freq_dtype: Literal["float32", "bfloat16"]
    vocabulary: Vocabulary
    epsilon: float
    """Number that OpenVLA's decoding adds to the range of the statistics; OpenVLA-OFT's adds 1e-8
    in every dialect."""


DIALECTS: Final[Mapping[Dialect, Conventions]] = {
    "openvla_oft": Conventions("exact", True, "float32", "all", 0.0),
    "simplevla": Conventions("exact", True, "float32", "all", 0.0),
    "simplevla_robotwin": Conventions("crop", True, "float32", "all", 0.0),
    "rlinf": Conventions("bicubic_float", False, "bfloat16", "actions", 1e-8),
    "rlinf_official": Conventions("bicubic_pillow", True, "bfloat16", "actions", 1e-8),
    "rlinf_robotwin": Conventions("crop", True, "bfloat16", "actions", 1e-8),
}
"""Conventions of each dialect. `openvla_oft` is the authors' evaluation in LIBERO. SimpleVLA-RL,
siiRL and SRPO (`simplevla`) agree with it there; in RoboTwin they only crop the simulator's frame,
and so does RLinf with its version `official`.
"""


def conventions_of(
    folder: Path, known: Conventions | None, asked: Dialect | None, *, without: Collection[str]
) -> Conventions:
    """Return the conventions that a checkpoint was saved with here, else those of a dialect, else
    OpenVLA's own.

    Args:
        folder: the checkpoint.
        known: its own conventions, if it was saved here.
        asked: name of the requested dialect, or None.
        without: fields that a policy of this family does not have; they are not compared.

    Raises: ConfigError for an unknown dialect; CheckpointError if the checkpoint was saved with
    other conventions than those requested.
    """
    if asked is not None and asked not in DIALECTS:
        raise ConfigError(f"dialect is {asked!r}, expected one of {', '.join(DIALECTS)}")
    wanted = DIALECTS[asked or "openvla_oft"]
    if known is None:
        return wanted
    known = known._replace(**{field: getattr(wanted, field) for field in without})
    if asked is not None and known != wanted:
        raise CheckpointError(
            f"{folder} was saved with {known}, which differs from the dialect {asked!r}; leave the "
            "dialect out, because the checkpoint stores its own."
        )
    return known
