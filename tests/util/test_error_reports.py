"""What a user sees of a traceback: their own frames, unless a bug of vla_rl may be behind the
error.
"""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vla_rl
from vla_rl.errors import EnvError
from vla_rl.util.error_reports import VARIABLE, format_short, shorten_traceback


def inside_vla_rl(source: str, **names: Any) -> Callable[[], Any]:
    """A function `run` whose frames are of a file of the package."""
    path = str(Path(vla_rl.__file__).parent / "somewhere.py")
    exec(compile(source, path, "exec"), names)
    run: Callable[[], Any] = names["run"]
    return run


CALL = "def run(): return call()"
"""Calls what it is handed."""


def users_mistake() -> None:
    raise KeyError("imag")


def raised_by(run: Callable[[], Any]) -> Exception:
    """What `run` raises, with its own frames only, as a boundary inside vla_rl sees it."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is
        run()
    local_traceback = caught.value.__traceback__
    return caught.value.with_traceback(
        local_traceback.tb_next if local_traceback is not None else None
    )


def functions_in(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_frames_of_vla_rl_around_a_mistake_of_the_user_are_left_out() -> None:
    error = raised_by(inside_vla_rl(CALL, call=inside_vla_rl(CALL, call=users_mistake)))
    assert functions_in(error) == ["run", "run", "users_mistake"]
    shorten_traceback(error)
    assert functions_in(error) == ["users_mistake"]


def test_every_frame_is_kept_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "full")
    error = raised_by(inside_vla_rl(CALL, call=users_mistake))
    shorten_traceback(error)
    assert functions_in(error) == ["run", "users_mistake"]


def test_what_may_be_a_bug_of_vla_rl_keeps_its_traceback() -> None:
    bug = raised_by(inside_vla_rl("def run(): return 1 / 0"))
    shorten_traceback(bug)
    assert functions_in(bug) == ["run"]


def test_where_vla_rl_raised_in_a_call_of_the_user_is_kept_unless_the_message_says_all() -> None:
    def users_call() -> None:
        inside_vla_rl("def deep(): raise kind('no')\ndef run(): deep()", kind=kind)()

    kind: type[Exception] = ValueError
    error = raised_by(inside_vla_rl(CALL, call=users_call))
    shorten_traceback(error)
    assert functions_in(error) == ["users_call", "deep"]
    kind = EnvError
    error = raised_by(inside_vla_rl(CALL, call=users_call))
    shorten_traceback(error)
    assert functions_in(error) == ["users_call"]


def test_an_error_that_says_all_has_no_traceback_and_its_cause_has_the_users() -> None:
    def run() -> None:
        inside_vla_rl(
            "def run():\n    try: call()\n    except KeyError as error: raise EnvError('step "
            "raised') from error",
            call=users_mistake,
            EnvError=EnvError,
        )()

    error = raised_by(run)
    error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ is not None else None
    lines = format_short(error).splitlines()
    assert lines[-1] == "vla_rl.errors.EnvError: step raised"
    assert "somewhere.py" not in "\n".join(lines)
    assert '    raise KeyError("imag")' in lines
