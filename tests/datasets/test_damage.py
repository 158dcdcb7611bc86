"""Damaged data sets are refused by file, field and row, whichever layout they have."""

import ast
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from made_datasets import LAYOUTS, change_rows, damaged, everything_in, hdf5, published

from vla_rl.datasets import read_hdf5, read_lerobot, read_recording, read_rlds
from vla_rl.datasets.lerobot.layout import Info, read_info
from vla_rl.datasets.lerobot.tables import DataFile, read_rows, read_tasks
from vla_rl.datasets.lerobot.video_files import decode_frames, read_video_tables
from vla_rl.datasets.opening import read_image_settings
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


ROOM = Path(__file__).parents[2] / "vla_rl/datasets"

RAW = {
    *("open", "read_bytes", "read_text", "load", "loads", "decode", "File", "ZipFile", "rglob"),
    *("ParquetFile", "read_table", "read_schema", "read_row_group", "iter_batches", "to_pylist"),
    *("imdecode", "run", "frombuffer", "read_npz", "read_mp4_tables", "_run_ffmpeg"),
}
"""Names of calls that read a file, or take apart what was read."""

BEHIND_ANOTHER = {
    "lerobot/video_files.py: _find_moov": "read_video_tables calls it inside of the guard",
    "lerobot/video_files.py: _read_runs": "read_video_tables calls it inside of the guard",
    "lerobot/video_files.py: read_mp4_tables": "read_video_tables calls it inside of the guard",
    "lerobot/video_files.py: _run_ffmpeg": "its two callers are inside of the guard",
    "lerobot/frames.py: VideoFile.decode": "calls decode_frames, which has the guard",
    "lerobot/frames.py: Videos.__init__": "calls VideoFile.decode",
    "lerobot/writing.py: compute_stats": "takes a table that was made in memory",
    "lerobot/writing.py: LeRobotWriter._remove_uncounted": "lists what its own writer left behind",
    "tf_records.py: _read_example": "read_examples calls it inside of the guard",
    "tf_records.py: _read_floats": "read_examples calls it inside of the guard",
    "image_files.py": "images of rows, each error named; tests/datasets/test_prompts.py damages them",
    "prompts.py": "rows of questions, whose readers tests/datasets/test_prompts.py damages",
}
"""Modules and functions that read without a guard of their own, each with the reason."""

READERS: dict[str, Callable[[Path], Any]] = {
    "hdf5.py: read_hdf5": lambda root: read_hdf5(root / "x"),
    "hdf5.py: _read_frame": lambda root: frame_of(root),
    "hdf5.py: _read_instruction": lambda root: described_by(root),
    "lerobot/frames.py: ImageColumns._decoded": lambda root: image_of(root, "x"),
    "lerobot/layout.py: read_info": lambda root: read_info(at(root, "meta/info.json")),
    "lerobot/tables.py: _iterate_json_lines": lambda root: read_tasks(
        at(root, "meta/tasks.jsonl"), V2
    ),
    "lerobot/tables.py: _iterate_task_rows": lambda root: read_tasks(
        at(root, "meta/tasks.parquet"), V3
    ),
    "lerobot/tables.py: DataFile.__init__": lambda root: DataFile(root / "x", 10),
    "lerobot/tables.py: DataFile._column": lambda root: DataFile(root / "x", 10),
    "lerobot/tables.py: DataFile.encoded_image": lambda root: DataFile(root / "x", 10),
    "lerobot/tables.py: DataFile.encoded_images": lambda root: DataFile(root / "x", 10),
    "lerobot/tables.py: read_rows": lambda root: read_rows(root / "x"),
    "lerobot/video_files.py: decode_frames": lambda root: decode_frames(
        root / "x", np.arange(3.0), np.arange(3)
    ),
    "lerobot/video_files.py: read_video_tables": lambda root: read_video_tables(root / "x"),
    "opening.py: _read_any": lambda root: everything_in(root / "x"),
    "opening.py: read_recording": lambda root: read_recording(root / "x"),
    "rlds.py: _warn_of_other_lengths": lambda root: described_rlds(root),
    "rlds.py: _read_frame": lambda root: rlds_frame(root),
    "rlds.py: _read_instructions": lambda root: read_rlds(at_rlds(root)),
    "tf_records.py: read_examples": lambda root: read_rlds(at_rlds(root)),
    "tf_records.py: read_span": lambda root: rlds_frame(root),
    "opening.py: read_image_settings": lambda root: read_image_settings(
        at(root, "a.settings.json")
    ),
}
"""Functions of the room that read, and a call that has each read the file `x`."""

FEW = {"codebase_version": "v3.0", "fps": 10, "data_path": "", "features": {}}
V3 = Info(**FEW, total_episodes=1, total_frames=1)  # type: ignore[arg-type]
V2 = Info(**{**FEW, "codebase_version": "v2.1"}, total_episodes=1, total_frames=1)  # type: ignore[arg-type]

CONTENTS = {
    "empty": b"",
    "zeros": bytes(2000),
    "text": b"no data set",
    "half of a zip": b"PK\x03\x04" + bytes(100),
    "deep JSON": b"[" * 20_000,
    "half a surrogate": b'{"task_index": 0, "task": "\\ud835"}',
    "HDF5's beginning": b"\x89HDF\r\n\x1a\n" + bytes(500),
    "Parquet's ends": b"PAR1" + bytes(100) + b"\xff\xff\xff\x7fPAR1",
    "a movie's beginning": b"\0\0\0\x18ftypisom" + bytes(100),
}


def at(root: Path, name: str) -> Path:
    """Put the file `x` where a reader of a folder looks for it; return the folder."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / "x").rename(root / name)
    return root


def frame_of(root: Path) -> Any:
    """Read a frame of an HDF5 file that was damaged after it was opened."""
    LAYOUTS["hdf5"](root / "set")
    episode = read_hdf5(root / "set/push_demo.hdf5")[0]
    (root / "x").rename(root / "set/push_demo.hdf5")
    return episode.frames["image"](0)


def at_rlds(root: Path) -> Path:
    """Put the file `x` beside a description of an RLDS data set; return the folder."""
    at(root, "set/data.tfrecord-00000-of-00001")
    (root / "set/features.json").write_text("{}")
    return root / "set"


def described_rlds(root: Path) -> Any:
    """Read a data set that the file describes."""
    LAYOUTS["rlds"](root / "set")
    (description,) = (root / "set").rglob("dataset_info.json")
    (root / "x").rename(description)
    return read_rlds(root / "set")


def rlds_frame(root: Path) -> Any:
    """Read a frame of an RLDS file that was damaged after it was opened."""
    LAYOUTS["rlds"](root / "set")
    episode = read_rlds(root / "set")[0]
    (stored,) = (root / "set").rglob("*.tfrecord*")
    (root / "x").rename(stored)
    return episode.frames["image"](0)


def described_by(root: Path) -> Any:
    """Read an HDF5 file whose description of the task is the file."""
    LAYOUTS["hdf5"](root / "set")
    words = (root / "x").read_bytes().decode("latin1").replace("\0", " ")
    with h5py.File(root / "set/push_demo.hdf5", "a") as file:
        file["data"].attrs["problem_info"] = words
    return read_hdf5(root / "set/push_demo.hdf5")


def image_of(root: Path, name: str) -> Any:
    """Read the file as the image of a row."""

    def outside(rows: list[dict[str, Any]]) -> None:
        rows[0]["observation.images.image"] = {"bytes": None, "path": str(root / name)}

    change_rows(published(root / "set", (2,)), outside)
    return read_lerobot(root / "set")[0].frames["image"](0)


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_refuses_whatever_is_no_file_of_its_kind(
    reader: str, content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DataError, match=str(tmp_path)):
        READERS[reader](tmp_path)


def raw_calls(path: Path) -> Iterator[tuple[str, bool, str]]:
    """Yield function, whether the guard is around it, and text of each call that reads."""

    def visit(node: ast.AST, function: str, is_guarded: bool) -> Iterator[tuple[str, bool, str]]:
        for child in ast.iter_child_nodes(node):
            name, guarded = function, is_guarded
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                # a function inside of another belongs to it
                name = f"{function}.{child.name}".lstrip(".") if is_outer(node) else function
            if isinstance(child, ast.With):
                guarded = guarded or any(
                    isinstance(item.context_expr, ast.Call)
                    and ast.unparse(item.context_expr.func) == "reading"
                    for item in child.items
                )
            if isinstance(child, ast.Call):
                called = child.func
                last = (
                    called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                )
                text = ast.unparse(child)
                # a search in folders of any depth meets some that cannot be listed
                is_deep = last == "find_files" and "**/" in text
                if last in RAW or is_deep or any(each.arg == "columns" for each in child.keywords):
                    yield function, is_guarded or guarded, text
            yield from visit(child, name, guarded)

    def is_outer(node: ast.AST) -> bool:
        return isinstance(node, ast.Module | ast.ClassDef)

    yield from visit(ast.parse(path.read_text()), "", False)


def found() -> Iterator[tuple[str, bool, str]]:
    for path in sorted(ROOM.rglob("*.py")):
        module = str(path.relative_to(ROOM))
        if module not in BEHIND_ANOTHER:
            for function, is_guarded, text in raw_calls(path):
                if f"{module}: {function}" not in BEHIND_ANOTHER:
                    yield f"{module}: {function}", is_guarded, text


def test_every_call_that_reads_is_inside_of_the_guard() -> None:
    bare = [f"{reader}: {text}" for reader, is_guarded, text in found() if not is_guarded]
    assert not bare, "put it inside of `with reading(...)`, or list it with its reason"


def test_every_function_that_reads_is_tested_here() -> None:
    assert {reader for reader, _, _ in found()} == set(READERS)


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


def link_other_file(file: h5py.File) -> None:
    other_path = Path(file.filename).with_name("elsewhere.h5")
    with h5py.File(other_path, "w") as other:
        other["x"] = np.zeros((3, 3))
    del file[STATE]
    file[STATE] = h5py.ExternalLink(other_path.name, "/x")


def link_to_a_link(file: h5py.File) -> None:
    link_other_file(file)
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
        (link_other_file, r"'obs/ee_pos' is a link to .*elsewhere\.h5, expected data in the file"),
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
