"""Damaged data sets: whatever is wrong with a file, one DataError names it.

Where a file holds checksums of its content, nothing wrong is read in silence.
"""

import random
from pathlib import Path

import pytest
from damage import LAYOUTS, damaged, everything_in

from vla_rl.errors import DataError

CHECKED = ("recording", "ours")
"""Layouts whose files hold checksums of numbers and images."""

IN_THE_SUITE, AS_A_PROOF = 50, 950
"""Damaged sets of each layout."""

OF_HDF5 = 500
"""Of set 573, HDF5's own library never returns: it loops over a damaged heap of texts."""


def run_damaged(layout: str, root: Path, numbers: range) -> tuple[int, list[str]]:
    """Read damaged copies of a data set.

    Returns: how many were refused; what went wrong: other errors, and wrong values in silence.
    """
    LAYOUTS[layout](root)
    whole = everything_in(root)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    refused, wrong = 0, []
    for number in numbers:
        rng = random.Random(number)
        path = rng.choice(files)
        content = path.read_bytes()
        path.write_bytes(damaged(content, rng, is_json=path.suffix in (".json", ".jsonl")))
        try:
            found = everything_in(root)
        except DataError as error:
            refused += 1
            if str(root) not in str(error) and "fps" not in str(error):
                wrong.append(f"{number}: {path.name}: no file is named: {error}")
        except Exception as error:
            wrong.append(f"{number}: {path.name}: {type(error).__name__}: {error}")
        else:
            holds_checksums = path.suffix == ".npz" or "data" in path.relative_to(root).parts
            if layout in CHECKED and holds_checksums and found != whole:
                wrong.append(f"{number}: {path.name}: other values in silence")
        finally:
            path.write_bytes(content)
    return refused, wrong


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_ends_in_one_error_that_names_the_file(layout: str, tmp_path: Path) -> None:
    refused, wrong = run_damaged(layout, tmp_path / "set", range(IN_THE_SUITE))
    assert not wrong
    assert refused > IN_THE_SUITE // 10


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_damage_ends_in_one_error_that_names_the_file(layout: str, tmp_path: Path) -> None:
    most = OF_HDF5 if layout == "hdf5" else AS_A_PROOF
    numbers = range(IN_THE_SUITE, IN_THE_SUITE + most)
    _, wrong = run_damaged(layout, tmp_path / "set", numbers)
    assert not wrong
