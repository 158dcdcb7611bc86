"""Attacks from inside a sandbox, as a program and as a function, with every combination of means
that the docs list.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from as_user import CANNOT

SUPPORT = Path(__file__).parent / "support"
PAGE = Path(__file__).parents[2] / "docs" / "text_environments.md"
TABLE = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in re.findall(r"^\| a call can \|.*?\n\n", PAGE.read_text(), re.DOTALL | re.MULTILINE)[
        0
    ]
    .strip()
    .splitlines()
]
COLUMNS = TABLE[0][1:]
LEFT_OUT = {
    "no namespaces": ("namespaces",),
    "no Landlock": ("landlock",),
    "neither": ("namespaces", "landlock"),
}


def attacked(column: str) -> dict[str, Any]:
    """Findings of `attacks.py`, as the user and with the means of a column."""
    who, _, rest = column.partition(", ")
    as_user = [str(SUPPORT / "as_user.py")] if who == "user" and os.geteuid() == 0 else []
    without = LEFT_OUT.get(rest, ())
    command = [
        sys.executable,
        *as_user,
        str(SUPPORT / "attacks.py"),
        json.dumps({"without": without}),
    ]
    search = os.pathsep.join([*(path for path in sys.path if path), str(SUPPORT)])
    environment = {**os.environ, "PYTHONPATH": search, "SECRET": "token"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=280, check=False
    )
    if done.returncode == CANNOT:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    if unexpected := set(found["missing"]) - set(without):
        pytest.skip(f"this kernel gives no {', '.join(unexpected)}")
    return found


IN_THE_SUITE = {"root", "user, neither"}
"""Columns with each user once, with all means and with none; the other six are proofs."""


@pytest.mark.parametrize(
    "column",
    [
        pytest.param(
            column,
            marks=[pytest.mark.proof] * (column not in IN_THE_SUITE)
            + [pytest.mark.needs_root] * column.startswith("root"),
        )
        for column in COLUMNS
    ],
)
def test_attacks_find_what_the_table_of_the_docs_says(column: str) -> None:
    index = COLUMNS.index(column) + 1
    can = {row[0]: {"yes": True, "no": False}[row[index]] for row in TABLE[2:]}
    found = attacked(column)
    assert found["program"] == {**can, "error": "", "is offline": True}
    assert found["function"] == {**can, "error": "", "is offline": True}
    rest = column.partition(", ")[2]
    if rest in ("", "no namespaces"):
        assert_limits_hold(found, has_mounts=rest == "")


def assert_limits_hold(found: dict[str, Any], *, has_mounts: bool) -> None:
    if has_mounts:
        for name in ("files", "removed files", "/dev/shm"):
            assert found[name].endswith("OSError: [Errno 28] No space left on device")
    else:
        assert (
            found["files"] == found["removed files"] == "it wrote more than 48 MiB or 10000 "
            "files and was stopped"
        )
        assert "Permission denied: '/dev/shm/part0'" in found["/dev/shm"]
    for name in ("memory", "shared memory"):
        assert found[name] == "it held more than 150 MiB of memory in all and was stopped"


def test_the_table_has_the_eight_columns() -> None:
    assert set(COLUMNS) > IN_THE_SUITE
    assert [
        f"{who}{rest}"
        for who in ("root", "user")
        for rest in ("", ", no namespaces", ", no Landlock", ", neither")
    ] == COLUMNS
