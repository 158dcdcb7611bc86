"""Children inherit the variables of this process, and not those that a library needs for a while."""

import os

import pytest

from vla_rl.actors.environment import borrowed_environment, inherited_environment


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIB_OLD", "before")
    for name in ("LIB_NEW", "BORROWED", "MINE"):
        monkeypatch.delenv(name, raising=False)


def test_borrowed_variables_are_set_here_and_not_inherited() -> None:
    with borrowed_environment({"BORROWED": "1", "LIB_OLD": "changed"}, ("LIB_",)):
        assert os.environ["BORROWED"] == "1"
        inherited = inherited_environment()
        assert "BORROWED" not in inherited
        assert inherited["LIB_OLD"] == "before"
    assert "BORROWED" not in os.environ
    assert os.environ["LIB_OLD"] == "before"


def test_what_the_library_sets_itself_goes_with_it_and_what_others_set_stays() -> None:
    with borrowed_environment({"BORROWED": "1"}, ("LIB_",)):
        os.environ["LIB_NEW"] = "theirs"
        os.environ["MINE"] = "ours"
        assert "LIB_NEW" not in inherited_environment()
        assert inherited_environment()["MINE"] == "ours"
    assert "LIB_NEW" not in os.environ
    assert os.environ.pop("MINE") == "ours"


def test_variables_are_restored_if_the_block_fails() -> None:
    with pytest.raises(ValueError, match="enough"), borrowed_environment({"BORROWED": "1"}, ()):
        raise ValueError("enough")
    assert "BORROWED" not in os.environ
