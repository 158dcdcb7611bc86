"""Every random stream follows from the run's seed and its own name."""

import numpy as np
import pytest

from vla_rl.types import derive_seed


def test_a_seed_depends_on_its_name_and_nothing_else() -> None:
    assert derive_seed(7, "episode", 3) == derive_seed(7, "episode", 3)
    names = [
        (7, "episode", 3),
        (7, "episode", 4),
        (8, "episode", 3),
        (7, "shuffle", 3),
        (7, "episode"),
        (7, "episode", "3"),
    ]
    assert len({derive_seed(*name) for name in names}) == len(names)


def test_a_seed_is_the_same_on_every_machine() -> None:
    assert derive_seed(0, "run") == 492060536513082702


def test_seeds_fit_a_signed_64_bit_integer() -> None:
    assert all(0 <= derive_seed(0, k) < 2**63 for k in range(1000))


def test_an_integer_of_numpy_gives_the_seed_of_the_same_number_and_other_types_are_refused() -> (
    None
):
    assert derive_seed(np.int64(7), "e", np.int32(3)) == derive_seed(7, "e", 3)
    assert derive_seed(7, np.str_("e")) == derive_seed(7, "e")
    for part in (3.0, None, ("e", 3)):
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            derive_seed(7, "e", part)  # type: ignore[arg-type]
