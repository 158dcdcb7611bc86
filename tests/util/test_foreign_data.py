"""Whatever a library raises about a file becomes one error that names it."""

from pathlib import Path
from typing import Any

import pytest
from durations import assert_grows_in_proportion

from vla_rl.errors import CheckpointError, DataError, EnvError
from vla_rl.util.foreign_data import (
    find_spans,
    get_number,
    get_text,
    get_whole_number,
    reading,
    reading_file,
    repair_texts,
    repair_unicode,
    require_text,
)


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
    def name_file() -> str:
        calls.append(1)
        return "row 7"

    calls: list[int] = []
    with reading(name_file, "whole", "get it again"):
        pass
    assert not calls
    with pytest.raises(DataError, match="row 7 is not whole"), reading(name_file, "whole", "again"):
        raise KeyError


def test_a_long_message_is_shortened() -> None:
    with pytest.raises(DataError) as caught, reading("x", "whole", "get it again"):
        raise ValueError("y" * 10_000)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [0, 7, 7.0, 2**53])
def test_whole_numbers_are_taken(value: Any) -> None:
    assert get_whole_number({"a": value}, "a", "row 1") == int(value)


@pytest.mark.parametrize("value", [-1, 0.5, True, "1", [1], float("nan"), 2**53 + 1, 10**400])
def test_what_is_no_whole_number_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(DataError, match=r"row 1: 'a' is .*, expected a whole number"):
        get_whole_number({"a": value}, "a", "row 1")


@pytest.mark.parametrize("value", ["1", True, [1.0], float("inf"), float("nan"), 10**400])
def test_what_is_no_number_is_refused(value: Any) -> None:
    assert get_number({"a": 3}, "a", "row 1") == 3.0
    with pytest.raises(DataError, match=r"row 1: 'a' is .*, expected a finite number"):
        get_number({"a": value}, "a", "row 1")


@pytest.mark.parametrize("value", [1, ["a"], b"a", {"a": 1}, "half \ud835"])
def test_what_is_no_text_never_becomes_one(value: Any) -> None:
    assert get_text({"a": "prüfen"}, "a", "row 1") == "prüfen"
    with pytest.raises(DataError, match=r"row 1: 'a' is .*, expected a text"):
        get_text({"a": value}, "a", "row 1")


def test_a_field_that_is_missing_or_null_says_what_there_is() -> None:
    with pytest.raises(DataError, match=r"row 1: 'a' is missing; it has \['b'\], expected a text"):
        get_text({"b": 1}, "a", "row 1")
    with pytest.raises(ValueError, match="row 1: 'a' is null, expected a number"):
        get_number({"a": None}, "a", "row 1", error=ValueError)


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


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("", []),
        ("<a>", []),
        ("</a><a>", []),
        ("<a></a>", [""]),
        ("<a>1</a>2<a>3</a>", ["1", "3"]),
        ("<a>1<a>2</a>3</a>", ["1<a>2"]),
        ("<a>1</a><a>2", ["1"]),
        ("<a>1</a>2</a>", ["1"]),
    ],
)
def test_a_span_stands_between_an_opening_and_the_next_closing(
    text: str, inside: list[str]
) -> None:
    spans = find_spans(text, "<a>", "</a>")
    assert [text[start:end] for start, end in spans] == inside


@pytest.mark.parametrize("piece", ["<a>", "</a>", "<a></a>", "<a", "<a><a>x</a>"])
def test_a_search_for_spans_grows_in_proportion_to_the_text(piece: str) -> None:
    assert_grows_in_proportion(
        lambda size: list(find_spans(piece * (size // len(piece)), "<a>", "</a>"))
    )


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("", ""),
        ("plain, \U0001d400 and \u00e9", "plain, \U0001d400 and \u00e9"),
        ("half: \ud835", "half: \ufffd"),
        ("\udc00 first", "\ufffd first"),
        ("a pair in two: \ud835\udc00", "a pair in two: \U0001d400"),
        ("turned round: \udc00\ud835!", "turned round: \ufffd\ufffd!"),
        ("caf\udce9.txt", "caf\ufffd.txt"),  # a file name of Latin-1
    ],
)
def test_half_a_surrogate_pair_becomes_the_replacement_character(text: str, valid: str) -> None:
    assert repair_unicode(text) == valid
    assert valid.encode().decode() == valid


def test_texts_in_plain_values_are_made_valid() -> None:
    given = {"caf\udce9": ["\ud835", ("a", 1, None)], "n": 0.5}
    assert repair_texts(given) == {"caf\ufffd": ["\ufffd", ("a", 1, None)], "n": 0.5}


def test_what_has_to_be_text_is_named_with_its_value_and_type() -> None:
    assert require_text("None", "'task' of row 1") == "None"
    with pytest.raises(
        DataError, match=r"^'task' of row 1 is None, a NoneType, expected a text\.$"
    ):
        require_text(None, "'task' of row 1")
    with pytest.raises(EnvError, match=r"is \['a'\], a list, expected a text"):
        require_text(["a"], "the instruction", EnvError)
