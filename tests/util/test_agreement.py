import pytest

from vla_rl.errors import CheckpointError, DataError
from vla_rl.util.agreement import agreed_value, excerpt


def test_a_value_that_both_sources_give_is_returned() -> None:
    assert agreed_value("the rate", ("a.json", 10), ("b.json", 10), remedy="remove one") == 10


def test_two_sources_that_differ_are_named_with_both_values_and_what_to_do() -> None:
    with pytest.raises(CheckpointError) as caught:
        agreed_value("the rate", ("a.json", 10), ("b.json", 30), remedy="remove the wrong one")
    assert str(caught.value) == (
        "two sources of the rate say different things: a.json says 10, b.json says 30, expected "
        "the same; remove the wrong one."
    )


def test_a_reader_of_data_raises_its_own_error() -> None:
    with pytest.raises(DataError, match="two sources of the task"):
        agreed_value("the task", ("a", "open"), ("b", None), remedy="choose", error=DataError)


def test_long_values_are_shown_from_where_they_differ() -> None:
    one, other = "x" * 500 + "a" + "y" * 500, "x" * 500 + "b" + "y" * 500
    with pytest.raises(CheckpointError) as caught:
        agreed_value("the template", ("a", one), ("b", other), remedy="remove one")
    words = str(caught.value)
    assert "xxxayyy" in words
    assert "xxxbyyy" in words
    assert len(words) < 400


def test_a_value_that_continues_the_other_is_shown_with_its_rest() -> None:
    with pytest.raises(CheckpointError, match="rest of it"):
        agreed_value("it", ("a", "x" * 300), ("b", "x" * 300 + "rest of it"), remedy="remove one")


def test_an_excerpt_of_a_long_value_is_short() -> None:
    assert excerpt("short") == "'short'"
    assert len(excerpt("x" * 70_000)) < 100
