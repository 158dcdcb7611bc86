"""Data types by texts from outside: which are accepted, and that no other reader takes such a text."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from vla_rl.util.dtypes import (
    MOST_ITEM_BYTES,
    TORCH_DTYPES,
    is_plain,
    plain_array,
    plain_dtype,
    torch_dtype,
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
    assert plain_dtype(text) == np.dtype(text)
    assert is_plain(np.dtype(text))


@pytest.mark.parametrize("name", ["bool", "uint8", "int64", "float16", "float32", "complex64"])
def test_a_name_of_a_number_is_read(name: str) -> None:
    assert plain_dtype(name) == np.dtype(name)


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
        plain_dtype(text)


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
    assert not is_plain(dtype)


def test_bytes_become_an_array_of_exactly_their_size() -> None:
    content = np.arange(6, dtype="<f4").tobytes()
    assert plain_array(content, "<f4", (2, 3)).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert plain_array(b"", "<f4", (0, 4)).shape == (0, 4)
    assert plain_array(content[:4], "<f4", ()).item() == 0.0
    shapes: list[tuple[object, ...]] = [
        *((7,), (5,), (-1,), (-2, -3), (1 << 62, 1 << 62), (2.0, 3), (True, 6), (1,) * 33 + (6,)),
    ]
    for shape in shapes:
        with pytest.raises(ValueError, match="24 bytes are an array of shape"):
            plain_array(content, "<f4", shape)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 bytes are an array of shape"):
        plain_array(b"", "<f4", (0, 1 << 62))


def test_a_tensor_has_a_type_of_the_list_and_no_other_name_of_torch() -> None:
    import torch

    assert torch_dtype("bfloat16") is torch.bfloat16
    assert all(isinstance(torch_dtype(name), torch.dtype) for name in TORCH_DTYPES)
    for name in ("load", "float", "hub", "__name__", "_C", "double"):
        with pytest.raises(ValueError, match="the type of a tensor is"):
            torch_dtype(name)


def test_types_of_arrays_are_read_without_torch() -> None:
    check = "import sys, vla_rl.util.dtypes; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


# ---- no other reader

READERS = {
    "np": {"dtype": 0, "frombuffer": 1, "fromstring": 1, "fromfile": 1, "memmap": 1, "load": 0},
    "torch": {"frombuffer": 1, "load": 0},
    "struct": {"unpack": 0, "unpack_from": 0, "iter_unpack": 0, "Struct": 0, "calcsize": 0},
}
"""Functions that read a type from a text or a file, and which argument is that one."""

ALLOWED = {
    "util/dtypes.py": ["np.dtype(found[0])", "getattr(torch, name)"],
    # the lengths are compared before: at most 32 axes
    "actors/codec.py": ["struct.unpack_from(f'<{ndim}Q', meta, _META.size + name_size)"],
    # types of spaces and pictures that are there, not texts
    "env_workers/packing.py": [
        "np.dtype((space.dtype, (*rows, *(space.shape or ()))))",
        "np.dtype({'names': names, 'formats': formats, 'offsets': offsets, 'itemsize': end})",
    ],
    "reporting/videos.py": ["np.dtype(image.dtype)"],
    # whole files, which torch reads by itself
    "models/prismatic/weights.py": ["torch.load(path, map_location='cpu', weights_only=True)"],
    "models/weight_files.py": [
        "torch.load(path, map_location='cpu', weights_only=True, mmap=zipfile.is_zipfile(path))"
    ],
    # NumPy's old names for LIBERO-plus, whose own code asks for them
    "envs/libero/images.py": ["np.frombuffer(data, dtype)", "getattr(np, name)"],
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
            if name == "load" or not all(map(is_named_here, kinds)):
                yield ast.unparse(node)


def is_named_here(kind: ast.expr) -> bool:
    """Return whether a type is a literal, or one of NumPy's or torch's by its name."""
    return isinstance(kind, ast.Constant) or ast.unparse(kind).startswith(("np.", "torch."))


def test_no_other_reader_takes_a_type_from_outside() -> None:
    others = [
        f"{name}: {call}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for call in readers_in(path)
        if call not in ALLOWED.get(name := str(path.relative_to(PACKAGE)), ())
    ]
    assert not others, "read the type with vla_rl.util.dtypes, or list the call with its reason"


def test_the_search_finds_a_reader_that_was_added(tmp_path: Path) -> None:
    path = tmp_path / "reader.py"
    path.write_text("kind = np.dtype(header['descr'])\nother = getattr(torch, name)\n")
    assert sorted(readers_in(path)) == ["getattr(torch, name)", "np.dtype(header['descr'])"]
    path.write_text("np.dtype('f4'), np.frombuffer(data, np.uint8), struct.Struct('<I')\n")
    assert not list(readers_in(path))
