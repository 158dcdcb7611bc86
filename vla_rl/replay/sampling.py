"""Rows of a batch, drawn from (seed, update, row) alone.

A generator that runs on has a state that a resume would need, and that one draw more would shift. Here
each number of a batch depends on the seed, the update and its row: a batch of 512 begins with the batch
of 256, and a run that goes on after a kill draws what it would have drawn.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, get_args

import numpy as np

from vla_rl.errors import ConfigError
from vla_rl.types import derive_seed

Stratum: TypeAlias = Literal[
    "all", "demonstrations", "online", "successes", "failures", "intervened", "labelled"
]
"""Rows that a share of a batch is drawn from.

    all               every row
    demonstrations    rows that were imported as demonstrations
    online            all others
    successes         rows of successful episodes, demonstrations among them
    failures          all others
    intervened        rows in which an expert or a person chose a control step
    labelled          rows with an expert's action
"""

STRATA: Final[tuple[Stratum, ...]] = get_args(Stratum)
STRATUM_FLAGS: Final[Mapping[Stratum, tuple[str | None, bool]]] = MappingProxyType(
    {
        "all": (None, True),
        "demonstrations": ("is_demonstration", True),
        "online": ("is_demonstration", False),
        "successes": ("is_success", True),
        "failures": ("is_success", False),
        "intervened": ("intervened", True),
        "labelled": ("has_expert", True),
    }
)
"""The flag that the rows of a stratum have, and its value; None for every row."""

EVERY_ROW: Final[Mapping[Stratum, float]] = MappingProxyType({"all": 1.0})
TOLERANCE: Final = 1e-6


def require_strata(strata: Mapping[Stratum, float]) -> None:
    """Raise ConfigError unless the strata are known and their shares add up to 1."""
    for name, share in strata.items():
        if name not in STRATA:
            raise ConfigError(f"a batch has the stratum {name!r}, expected {', '.join(STRATA)}")
        if not 0.0 <= share <= 1.0:
            raise ConfigError(f"the share of {name} in a batch is {share!r}, expected 0 to 1")
    if abs(sum(strata.values()) - 1.0) > TOLERANCE:
        raise ConfigError(f"the shares of a batch are {dict(strata)}, expected a sum of 1")


def split_batch(batch: int, strata: Mapping[Stratum, float]) -> dict[Stratum, int]:
    """Return the rows of each stratum, which add up to `batch`; the largest remainders get one more."""
    exact = {name: share * batch for name, share in strata.items()}
    counts = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: batch - sum(counts.values())]:
        counts[name] += 1
    return counts


def draw_fractions(seed: int, update: int, name: str, count: int) -> np.ndarray:
    """Return the numbers of rows 0 to count - 1, float64 in [0, 1).

    The stream is Philox's (Salmon et al. 2011), a function of key and counter whose raw output NumPy
    keeps the same in all versions.
    """
    stream = np.random.Philox(key=derive_seed(seed, "replay", update, name))
    # the upper 53 bits, as doubles are made; 64 would round up to 1.0
    fractions: np.ndarray = (stream.random_raw(count) >> np.uint64(11)) * 2.0**-53
    return fractions


def draw_positions(seed: int, update: int, name: str, count: int, num_rows: int) -> np.ndarray:
    """Return positions below `num_rows` for rows 0 to count - 1, int64 [count], with replacement."""
    return (draw_fractions(seed, update, name, count) * num_rows).astype(np.int64)
