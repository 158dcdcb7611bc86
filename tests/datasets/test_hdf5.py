"""HDF5 files whose numbers are not all in them, or not what they claim, are refused by field."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from made_datasets import hdf5

from vla_rl.datasets import read_hdf5
from vla_rl.errors import DataError

STATE = "data/demo_0/obs/ee_pos"


def made(root: Path, change: Callable[[h5py.File], Any] | None = None) -> Path:
    """A file of two demonstrations of three steps, changed."""
    path = root / "push_demo.hdf5"
    rng = np.random.default_rng(0)
    hdf5(path, {f"demo_{number}": rng.uniform(-1, 1, (3, 7)) for number in range(2)})
    if change is not None:
        with h5py.File(path, "a") as file:
            change(file)
    return path


def replaced(name: str, **options: Any) -> Callable[[h5py.File], Any]:
    def change(file: h5py.File) -> None:
        del file[name]
        file.create_dataset(name, **options)

    return change


def link_elsewhere(file: h5py.File) -> None:
    elsewhere = Path(file.filename).with_name("elsewhere.h5")
    with h5py.File(elsewhere, "w") as other:
        other["x"] = np.zeros((3, 3))
    del file[STATE]
    file[STATE] = h5py.ExternalLink(elsewhere.name, "/x")


def link_to_a_link(file: h5py.File) -> None:
    link_elsewhere(file)
    file.move(STATE, "aside")
    file[STATE] = h5py.SoftLink("/aside")


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((3, 3), "f8")
    layout[:] = h5py.VirtualSource("nowhere.h5", "x", (3, 3))
    del file[STATE]
    file.create_virtual_dataset(STATE, layout)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (link_elsewhere, r"'obs/ee_pos' is a link to .*elsewhere\.h5, expected data in the file"),
        (link_to_a_link, r"'obs/ee_pos' is a link to .*elsewhere\.h5, expected data in the file"),
        (virtual, "'obs/ee_pos' is stored in other files"),
        (
            replaced(STATE, shape=(3, 3), dtype="f8", external=[("raw", 0, 72)]),
            "'obs/ee_pos' is stored in other files",
        ),
        (
            replaced(STATE, shape=(10**12, 3), dtype="f8", chunks=(10, 3)),
            r"'obs/ee_pos' claims float64 of shape \(1000000000000, 3\), and the file holds 0 bytes",
        ),
        (
            replaced(STATE, shape=(3, 3), dtype="f8"),
            r"'obs/ee_pos' claims float64 of shape \(3, 3\), and the file holds 0 bytes",
        ),
        (replaced(STATE, data=["a", "b", "c"]), r"'obs/ee_pos' is object of shape \[3\]"),
        (replaced(STATE, data=np.array([b"1"] * 3)), r"'obs/ee_pos' is \|S1 of shape \[3\]"),
        (replaced(STATE, data=1.0), r"'obs/ee_pos' is float64 of shape \[\]"),
        (replaced(STATE, data=np.zeros(3)), r"'obs/ee_pos' is \[3\], expected \[T, D\]"),
        (
            replaced("data/demo_0/obs/agentview_rgb", data=np.zeros((3, 8, 8, 3), np.float32)),
            r"'obs/agentview_rgb' is float32 of shape \[3, 8, 8, 3\], expected images, uint8",
        ),
        (lambda file: file.create_group("data/demo_x"), "'data' has 'demo_x', expected demo_ and"),
        (replaced("data/demo_0", data=1.0), "demo_0 is not a group of LIBERO's layout"),
        (replaced("data", data=1.0), "'data' is no group, expected one with demonstrations"),
    ],
)
def test_numbers_that_are_not_whole_in_the_file_are_refused(
    change: Callable[[h5py.File], Any], message: str, tmp_path: Path
) -> None:
    path = made(tmp_path, change)
    with pytest.raises(DataError, match=r"push_demo\.hdf5.*" + message):
        read_hdf5(path)


def test_rows_of_which_a_part_was_never_written_are_refused(tmp_path: Path) -> None:
    def change(file: h5py.File) -> None:
        del file[STATE]
        partly = file.create_dataset(STATE, shape=(3, 3), dtype="f8", chunks=(1, 3))
        partly[0] = 1.0

    with pytest.raises(DataError, match=r"'obs/ee_pos' claims float64 .* holds 24 bytes"):
        read_hdf5(made(tmp_path, change))


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}, {"compression": "lzf"}])
def test_chunks_compression_and_links_inside_of_the_file_stay_readable(
    options: dict[str, Any], tmp_path: Path
) -> None:
    def change(file: h5py.File) -> None:
        values = file[STATE][:]
        del file[STATE]
        file.create_dataset("aside", data=values, chunks=(2, 3), **options)
        file[STATE] = h5py.SoftLink("/aside")

    plain = read_hdf5(made(tmp_path / "plain"))
    changed = read_hdf5(made(tmp_path / "changed", change))
    assert np.array_equal(plain[0].vectors["state"], changed[0].vectors["state"])


@pytest.mark.parametrize(
    "said", [{}, {"language_instruction": None}, {"language_instruction": [1]}, ["push"], "push"]
)
def test_a_description_of_the_task_that_is_no_text_is_refused(said: Any, tmp_path: Path) -> None:
    def change(file: h5py.File) -> None:
        file["data"].attrs["problem_info"] = json.dumps(said)

    path = made(tmp_path, change)
    with pytest.raises(DataError, match="the attribute 'problem_info' is not a description of"):
        read_hdf5(path)


def test_another_number_of_demonstrations_than_the_file_notes_gets_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(file: h5py.File) -> None:
        file["data"].attrs["num_demos"] = 3

    assert len(read_hdf5(made(tmp_path, change))) == 2
    (line,) = [record.getMessage() for record in caplog.records]
    assert "'num_demos' is" in line
    assert "there are 2 demonstrations, which are read" in line
