"""Whatever a library raises about a file becomes one error that names it."""

from pathlib import Path
from typing import Any

import pytest

from vla_rl.errors import CheckpointError, DataError
from vla_rl.util.foreign_data import number_in, reading, reading_file, text_in, whole_number_in


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (KeyError("task"), "x is not whole: KeyError: 'task'; get it again"),
        (ValueError("two\nlines."), "x is not whole: two lines; get it again"),
        (RuntimeError(), "x is not whole: RuntimeError; get it again"),
        (MemoryError(), "x is not whole: MemoryError; get it again"),
        (RecursionError("deep"), "x is not whole: RecursionError: deep; get it again"),
        (FileNotFoundError(2, "No such file"), "x cannot be read .No such file., expected whole"),
    ],
)
def test_an_error_of_a_library_names_the_file(raised: Exception, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught, reading("x", "whole", "get it again"):
        raise raised
    assert caught.value.__cause__ is raised


def test_errors_of_ours_and_of_the_wanted_class_pass_as_they_are() -> None:
    for raised in (CheckpointError("a"), DataError("b")):
        with pytest.raises(type(raised)) as caught, reading("x", "whole", "get it again"):
            raise raised
        assert caught.value is raised
    with (
        pytest.raises(ValueError, match="as it is"),
        reading("x", "whole", "get it again", error=ValueError),
    ):
        raise ValueError("as it is")


def test_what_ends_the_program_passes() -> None:
    with pytest.raises(KeyboardInterrupt), reading("x", "whole", "get it again"):
        raise KeyboardInterrupt


def test_a_place_that_costs_something_is_computed_for_an_error_only() -> None:
    def place() -> str:
        calls.append(1)
        return "row 7"

    calls: list[int] = []
    with reading(place, "whole", "get it again"):
        pass
    assert not calls
    with pytest.raises(DataError, match="row 7 is not whole"), reading(place, "whole", "again"):
        raise KeyError


def test_a_long_message_is_shortened() -> None:
    with pytest.raises(DataError) as caught, reading("x", "whole", "get it again"):
        raise ValueError("y" * 10_000)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [0, 7, 7.0, 2**53])
def test_whole_numbers_are_taken(value: Any) -> None:
    assert whole_number_in({"a": value}, "a", "row 1") == int(value)


@pytest.mark.parametrize("value", [-1, 0.5, True, "1", [1], float("nan"), 2**53 + 1, 10**400])
def test_what_is_no_whole_number_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(DataError, match=r"row 1: 'a' is .*, expected a whole number"):
        whole_number_in({"a": value}, "a", "row 1")


@pytest.mark.parametrize("value", ["1", True, [1.0], float("inf"), float("nan"), 10**400])
def test_what_is_no_number_is_refused(value: Any) -> None:
    assert number_in({"a": 3}, "a", "row 1") == 3.0
    with pytest.raises(DataError, match=r"row 1: 'a' is .*, expected a finite number"):
        number_in({"a": value}, "a", "row 1")


@pytest.mark.parametrize("value", [1, ["a"], b"a", {"a": 1}, "half \ud835"])
def test_what_is_no_text_never_becomes_one(value: Any) -> None:
    assert text_in({"a": "prüfen"}, "a", "row 1") == "prüfen"
    with pytest.raises(DataError, match=r"row 1: 'a' is .*, expected a text"):
        text_in({"a": value}, "a", "row 1")


def test_a_field_that_is_missing_or_null_says_what_there_is() -> None:
    with pytest.raises(DataError, match=r"row 1: 'a' is missing; it has \['b'\], expected a text"):
        text_in({"b": 1}, "a", "row 1")
    with pytest.raises(ValueError, match="row 1: 'a' is null, expected a number"):
        number_in({"a": None}, "a", "row 1", error=ValueError)


def test_a_file_that_is_a_folder_cannot_be_read(tmp_path: Path) -> None:
    with (
        pytest.raises(
            DataError, match=r"cannot be read \(Is a directory\), expected a file; choose"
        ),
        reading(tmp_path, "a file", "choose one"),
    ):
        tmp_path.read_bytes()


FILE = Path("/data/a.npz")


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (ValueError("no array."), "no array"),
        (KeyError("corners"), "KeyError: 'corners'"),
        (RecursionError("too deep"), "RecursionError: too deep"),
        (OSError(5, "Input/output error"), r"\[Errno 5\] Input/output error"),
        (EOFError(), "EOFError"),
    ],
)
def test_any_error_becomes_one_that_names_the_file_and_what_to_do(
    raised: Exception, words: str
) -> None:
    with (
        pytest.raises(ValueError, match=rf"^/data/a\.npz is no scene: {words}; export it again\.$"),
        reading_file(FILE, " is no scene", "export it again"),
    ):
        raise raised


def test_an_error_that_names_the_file_already_passes_as_it_is() -> None:
    error = ValueError(f"{FILE} unpacks to 7 bytes")
    with (
        pytest.raises(ValueError, match=r"^/data/a\.npz unpacks to 7 bytes$") as caught,
        reading_file(FILE, " is no scene", "export it again"),
    ):
        raise error
    assert caught.value is error
