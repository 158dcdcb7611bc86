"""Reading text that a model, a tool or a page wrote."""

import pytest
from growth import assert_grows_in_proportion

from vla_rl.errors import DataError, EnvError
from vla_rl.util.foreign_text import (
    delimited_spans,
    required_text,
    valid_texts,
    valid_unicode,
)


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
    spans = delimited_spans(text, "<a>", "</a>")
    assert [text[start:end] for start, end in spans] == inside


@pytest.mark.parametrize("piece", ["<a>", "</a>", "<a></a>", "<a", "<a><a>x</a>"])
def test_a_search_for_spans_grows_in_proportion_to_the_text(piece: str) -> None:
    assert_grows_in_proportion(
        lambda size: list(delimited_spans(piece * (size // len(piece)), "<a>", "</a>"))
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
    assert valid_unicode(text) == valid
    assert valid.encode().decode() == valid


def test_texts_in_plain_values_are_made_valid() -> None:
    given = {"caf\udce9": ["\ud835", ("a", 1, None)], "n": 0.5}
    assert valid_texts(given) == {"caf\ufffd": ["\ufffd", ("a", 1, None)], "n": 0.5}


def test_what_has_to_be_text_is_named_with_its_value_and_type() -> None:
    assert required_text("None", "'task' of row 1") == "None"
    with pytest.raises(
        DataError, match=r"^'task' of row 1 is None, a NoneType, expected a text\.$"
    ):
        required_text(None, "'task' of row 1")
    with pytest.raises(EnvError, match=r"is \['a'\], a list, expected a text"):
        required_text(["a"], "the instruction", EnvError)
