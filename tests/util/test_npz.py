"""Arrays of foreign .npz files: what NumPy writes is read, and a header is never believed."""

import ast
import io
import struct
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.util.npz import read_npz


def npz(path: Path, **members: bytes) -> Path:
    """A zip with these files, as they are."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def array_file(descr: Any = "<f4", shape: Any = (2,), content: bytes = b"\0" * 8) -> bytes:
    """An array's file with any header."""
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_whatever_numpy_writes_is_read(save: Any, tmp_path: Path) -> None:
    given = {
        "numbers": np.arange(6.0).reshape(2, 3),
        "columns": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "word": np.array("prüfen"),
        "words": np.array(["a", "bc"]),
        "empty": np.zeros((0, 3), np.float32),
        "nothing": np.array(""),
        "truth": np.array(True),
        "big": np.arange(3, dtype=">i2"),
    }
    save(tmp_path / "x.npz", **given)
    found = read_npz(tmp_path / "x.npz")
    assert list(found) == list(given)
    for name, array in given.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)
    found["numbers"][0] = 7  # like numpy.load's, an array of one's own


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (array_file(shape=(25 << 38,)), r"'a' is '<f4' of shape \(6871947673600,\), and its bytes"),
        (array_file(shape=(3,)), r"'a' is '<f4' of shape \(3,\), and its bytes are"),
        (array_file(shape=(-1, -2)), r"'a' is '<f4' of shape \(-1, -2\)"),
        (array_file(shape="x"), "'a' is '<f4' of shape 'x'"),
        (array_file("M8[s/0]"), r"'a': dtype is 'M8\[s/0\]', expected"),
        (array_file("|O"), "'a' holds Python objects"),
        (array_file([("x", "<f4")]), "'a' holds records"),
        (array_file("<f4)"), "'a': dtype is"),
        (b"\x93NUMPY\x01\x00\x02\x00[]", r"'a' has the header \[\], which is not NumPy's"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\x7f", "'a' has a header of 2147483647 bytes"),
        (b"no array", "'a' is no array of NumPy's format"),
        (b"", "'a' is no array of NumPy's format"),
    ],
)
def test_a_header_that_the_bytes_do_not_bear_out_is_refused(
    member: bytes, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        read_npz(npz(tmp_path / "x.npz", a=member))


def test_two_arrays_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile's own, about the name
        for name in ("a.npy", "a.npy"):
            archive.writestr(name, array_file())
    with pytest.raises(ValueError, match="two arrays have the name 'a'"):
        read_npz(path)


def test_an_encrypted_array_is_refused(tmp_path: Path) -> None:
    content = bytearray(npz(tmp_path / "x.npz", a=array_file()).read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(signature) + flags] |= 1
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(ValueError, match="'a' is encrypted"):
        read_npz(tmp_path / "x.npz")


def test_a_zip_that_claims_more_than_it_can_hold_is_not_unpacked(tmp_path: Path) -> None:
    content = bytearray(npz(tmp_path / "x.npz", a=array_file()).read_bytes())
    at = content.index(b"PK\x01\x02") + 24
    content[at : at + 4] = struct.pack("<I", 1 << 31)
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(ValueError, match="'a' claims 2147483648 bytes"):
        read_npz(tmp_path / "x.npz")


def test_a_flipped_byte_of_an_array_is_noticed_by_the_zips_checksum(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.arange(64.0))
    content = bytearray(buffer.getvalue())
    content[400] ^= 1
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(zipfile.BadZipFile, match="CRC"):
        read_npz(tmp_path / "x.npz")


@pytest.mark.parametrize("reader", ["scene", "plans", "initial states"])
def test_no_reader_of_such_files_hands_numpy_a_type_that_ends_the_process(
    tmp_path: Path, reader: str
) -> None:
    names = {"scene": ["format"], "plans": ["tokens", "waypoints", "interval_s"]}
    path = tmp_path / "damaged.npz"
    header = b"{'descr': 'M8[s/0]', 'fortran_order': False, 'shape': (1,), }"
    header += b" " * (117 - len(header)) + b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names.get(reader, ["states"]):
            content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(8)
            archive.writestr(f"{name}.npy", content)
    # in a process of its own: such a type would end this one
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from vla_rl.envs.driving.scores.plans import read_plans\n"
        "from vla_rl.envs.driving.scores.scene_files import read_arrays\n"
        "from vla_rl.envs.libero.task_files import read_init_states\n"
        "read = {'scene': read_arrays, 'plans': read_plans}.get(sys.argv[1], read_init_states)\n"
        "try:\n    read(Path(sys.argv[2]))\nexcept ValueError as error:\n    print(error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, reader, str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "damaged.npz" in ended.stdout


def test_no_file_is_read_by_numpy_load() -> None:
    package = Path(__file__).parents[2] / "vla_rl"
    calls = [
        f"{path.relative_to(package)}: {ast.unparse(node)}"
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "numpy.load")
    ]
    assert not calls, "read it with vla_rl.util.npz, inside of a guard"
