"""Arrays that others describe are read, or refused with what is wrong."""

import ast
import io
import struct
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.util.arrays import (
    MOST_ITEM_BYTES,
    TORCH_DTYPES,
    is_plain_dtype,
    parse_dtype,
    read_npz,
    torch_dtype,
    view_as_array,
)

PACKAGE = Path(__file__).parents[2] / "vla_rl"


@pytest.mark.parametrize(
    "text",
    [
        *("|b1", "|u1", "<i2", ">i8", "<f2", "<f4", "=f8", "<c16"),
        *("|S5", "<U12", ">U3", "|V4", "<M8[ns]", "<m8[25us]", "<M8"),
    ],
)
def test_what_numpy_writes_of_a_plain_type_is_read(text: str) -> None:
    assert parse_dtype(text) == np.dtype(text)
    assert is_plain_dtype(np.dtype(text))


@pytest.mark.parametrize("name", ["bool", "uint8", "int64", "float16", "float32", "complex64"])
def test_a_name_of_a_number_is_read(name: str) -> None:
    assert parse_dtype(name) == np.dtype(name)


@pytest.mark.parametrize(
    "text",
    [
        # these divide by zero inside NumPy, which ends the process
        *("M8[s/0]", "M8[Y/0]", "M8[7D/0]", "<m8[25us/0]", "datetime64[s/0]", "timedelta64[h/0]"),
        *("M8[s/4]", "M8[s]//2", "M8[0s]", "M8[2147483648s]", "M8[x]", "f8[s]"),
        *(
            "O",
            "|O8",
            "f4,f4",
            "(2,3)f4",
            "i4, (3)f8",
            "{'names': []}",
            "T",
            "a9",
            "p",
            "int",
            "float",
        ),
        *("S0", "U0", "V0", "S", "U", "f3", "i16", "b2", "u0", "m4", f"S{MOST_ITEM_BYTES + 1}"),
        *(
            "U536870912",
            "S99999999999",
            "",
            " f4",
            "f4\n",
            "<<f4",
            "f4" * 40,
            "\u0664f4",
            "f\u0664",
        ),
    ],
)
def test_any_other_text_is_refused_before_numpy_sees_it(text: str) -> None:
    with pytest.raises(ValueError, match=r"^dtype is "):
        parse_dtype(text)


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype(object),
        np.dtype([("a", "f4")]),
        np.dtype(("f4", (2,))),
        np.dtypes.StringDType(),
        np.dtype("V0"),
    ],
    ids=str,
)
def test_a_type_whose_text_does_not_say_all_about_it_is_not_plain(dtype: np.dtype) -> None:  # type: ignore[type-arg]
    assert not is_plain_dtype(dtype)


def test_bytes_become_an_array_of_exactly_their_size() -> None:
    content = np.arange(6, dtype="<f4").tobytes()
    assert view_as_array(content, "<f4", (2, 3)).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert view_as_array(b"", "<f4", (0, 4)).shape == (0, 4)
    assert view_as_array(content[:4], "<f4", ()).item() == 0.0
    shapes: list[tuple[object, ...]] = [
        *((7,), (5,), (-1,), (-2, -3), (1 << 62, 1 << 62), (2.0, 3), (True, 6), (1,) * 33 + (6,)),
    ]
    for shape in shapes:
        with pytest.raises(ValueError, match="24 bytes are an array of shape"):
            view_as_array(content, "<f4", shape)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 bytes are an array of shape"):
        view_as_array(b"", "<f4", (0, 1 << 62))


def test_a_tensor_has_a_type_of_the_list_and_no_other_name_of_torch() -> None:
    import torch

    assert torch_dtype("bfloat16") is torch.bfloat16
    assert all(isinstance(torch_dtype(name), torch.dtype) for name in TORCH_DTYPES)
    for name in ("load", "float", "hub", "__name__", "_C", "double"):
        with pytest.raises(ValueError, match="the type of a tensor is"):
            torch_dtype(name)


def test_types_of_arrays_are_read_without_torch() -> None:
    check = "import sys, vla_rl.util.arrays; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


# ---- no other reader

READERS = {
    "np": {"dtype": 0, "frombuffer": 1, "fromstring": 1, "fromfile": 1, "memmap": 1, "load": 0},
    "torch": {"frombuffer": 1, "load": 0},
    "struct": {"unpack": 0, "unpack_from": 0, "iter_unpack": 0, "Struct": 0, "calcsize": 0},
}
"""Functions that read a type from a text or a file, and which argument is that one."""

ALLOWED = {
    "util/arrays.py": ["np.dtype(found[0])", "getattr(torch, name)"],
    # the lengths are compared before: at most 32 axes
    "actors/wire/codec.py": ["struct.unpack_from(f'<{ndim}Q', meta, _META.size + name_size)"],
    # types of spaces and images that are there, not texts
    "env_workers/packing.py": [
        "np.dtype((space.dtype, (*rows, *(space.shape or ()))))",
        "np.dtype({'names': names, 'formats': formats, 'offsets': offsets, 'itemsize': end})",
    ],
    "reporting/videos.py": ["np.dtype(image.dtype)"],
    # numbers alone, and the sizes are compared with the bytes before
    "serving/openpi_messages.py": ["np.frombuffer(data, dtype)", "np.dtype(name)"],
    # kinds that the code names; the sizes are bounded, and compared with the bytes before
    "replay/transitions.py": ["np.dtype(columns, align=True)"],
    # whole files, which torch reads by itself
    "models/tensor_reading.py": ["torch.load(path, map_location='cpu', weights_only=True)"],
    "models/weight_files.py": [
        "torch.load(path, map_location='cpu', weights_only=True, mmap=zipfile.is_zipfile(path))"
    ],
    # NumPy's old names for LIBERO-plus, whose own code asks for them
    "envs/libero/env.py": ["np.frombuffer(data, dtype)", "getattr(np, name)"],
}
"""Readers whose type does not come from outside, or is compared before; by file."""


def readers_in(path: Path) -> Iterator[str]:
    """Yield the calls that read a type which the code itself does not name."""
    text = path.read_text()
    if not any(f"{module}." in text or f"({module}," in text for module in READERS):
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        module, _, name = ast.unparse(node.func).rpartition(".")
        if name == "getattr" and ast.unparse(node.args[0]) in READERS:
            yield ast.unparse(node)
        elif (at := READERS.get(module.replace("numpy", "np"), {}).get(name)) is not None:
            named = [each.value for each in node.keywords if each.arg == "dtype"]
            kinds = named or node.args[at : at + 1]
            if name == "load" or not all(map(is_named_local, kinds)):
                yield ast.unparse(node)


def is_named_local(kind: ast.expr) -> bool:
    """Return whether a type is a literal, or one of NumPy's or torch's by its name."""
    return isinstance(kind, ast.Constant) or ast.unparse(kind).startswith(("np.", "torch."))


def test_no_other_reader_takes_a_type_from_outside() -> None:
    others = [
        f"{name}: {call}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for call in readers_in(path)
        if call not in ALLOWED.get(name := str(path.relative_to(PACKAGE)), ())
    ]
    assert not others, "read the type with vla_rl.util.arrays, or list the call with its reason"


def test_the_search_finds_a_reader_that_was_added(tmp_path: Path) -> None:
    path = tmp_path / "reader.py"
    path.write_text("kind = np.dtype(header['descr'])\nother = getattr(torch, name)\n")
    assert sorted(readers_in(path)) == ["getattr(torch, name)", "np.dtype(header['descr'])"]
    path.write_text("np.dtype('f4'), np.frombuffer(data, np.uint8), struct.Struct('<I')\n")
    assert not list(readers_in(path))


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
        "from vla_rl.envs.driving.scores.scene_files import read_plans\n"
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
        if ".load" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "numpy.load")
    ]
    assert not calls, "read it with vla_rl.util.arrays, inside of a guard"
