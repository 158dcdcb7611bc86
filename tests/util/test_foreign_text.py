"""Reading text that a model, a tool or a page wrote."""

import pytest
from growth import assert_grows_in_proportion

from vla_rl.util.foreign_text import delimited_spans, valid_unicode


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
