"""One error names the file that another program wrote, whatever a library raises about it."""

from pathlib import Path

import pytest

from vla_rl.util.foreign_files import MOST_SHOWN, reading_file

PATH = Path("/data/a.npz")


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (ValueError("no array."), "no array"),
        (KeyError("corners"), "KeyError: 'corners'"),
        (RecursionError("too deep"), "RecursionError: too deep"),
        (OSError(5, "Input/output error"), r"\[Errno 5\] Input/output error"),
        (EOFError(), "EOFError: EOFError"),
    ],
)
def test_any_error_becomes_one_that_names_the_file_and_what_to_do(
    raised: Exception, words: str
) -> None:
    with (
        pytest.raises(ValueError, match=rf"^/data/a\.npz is no scene: {words}; export it again\.$"),
        reading_file(PATH, " is no scene", "export it again"),
    ):
        raise raised


def test_an_error_that_names_the_file_already_passes_as_it_is() -> None:
    error = ValueError(f"{PATH} unpacks to 7 bytes")
    with (
        pytest.raises(ValueError, match=r"^/data/a\.npz unpacks to 7 bytes$") as caught,
        reading_file(PATH, " is no scene", "export it again"),
    ):
        raise error
    assert caught.value is error


def test_a_claim_of_more_memory_than_there_is_is_said_so_and_a_long_message_is_cut() -> None:
    with (
        pytest.raises(ValueError, match="claims more memory than there is"),
        reading_file(PATH, " is no scene", "export it again"),
    ):
        raise MemoryError
    with (
        pytest.raises(ValueError, match=r"x\.\.\.") as caught,
        reading_file(PATH, "", "export it again"),
    ):
        raise TypeError("x" * 10_000)
    assert len(str(caught.value)) < MOST_SHOWN + 100
