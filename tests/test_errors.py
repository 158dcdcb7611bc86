"""Errors as users get them: those that are handled apart can be told apart, each says what was wrong.

Of a traceback they see their own frames, unless a bug of vla_rl may be behind the error.
"""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vla_rl
from vla_rl.errors import (
    ActorDied,
    ActorFrozen,
    AssetError,
    ContextOverflow,
    EnvError,
    PackageError,
    RankFailed,
    RankNotStarted,
)
from vla_rl.util.error_reports import VARIABLE, format_short, shorten_traceback


def test_a_dead_actor_is_named_with_its_cause_and_its_last_words() -> None:
    error = ActorDied("sim", 12, "exit code 3", ["Traceback", "ValueError: no"])
    assert str(error) == (
        "actor 'sim' (pid 12) died: exit code 3; the end of its stderr:\n    Traceback\n    ValueError: no"
    )
    assert str(ActorFrozen("sim", 12, "SIGKILL")) == "actor 'sim' (pid 12) died: SIGKILL"


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


RANK = RankNotStarted("rank 1 died", 1)


@pytest.mark.parametrize(
    "error",
    [
        RANK,
        caused(ValueError("node failed"), RANK),
        ExceptionGroup("several", [ValueError("other"), ExceptionGroup("inner", [RANK])]),
        caused(ValueError("outer"), caused(OSError("middle"), RANK)),
    ],
    ids=["itself", "cause", "group", "cause of a cause"],
)
def test_the_failure_of_a_rank_is_found_wherever_it_is(error: Exception) -> None:
    assert RankFailed.found_in(error) is RANK


def test_other_errors_hold_no_failure_of_a_rank() -> None:
    assert RankFailed.found_in(ExceptionGroup("several", [ValueError("other")])) is None


def test_errors_of_assets_and_packages_are_also_pythons_own() -> None:
    assert issubclass(AssetError, EnvError)
    assert issubclass(AssetError, FileNotFoundError)
    assert issubclass(PackageError, ImportError)


def test_a_prompt_without_room_says_both_numbers() -> None:
    error = ContextOverflow(300, 256)
    assert (error.num_tokens, error.context_size) == (300, 256)
    assert "the prompt has 300 tokens and the context 256" in str(error)


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


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.usefixtures("short")
def test_frames_of_vla_rl_around_a_mistake_of_the_user_are_left_out() -> None:
    error = raised_by(inside_vla_rl(CALL, call=inside_vla_rl(CALL, call=users_mistake)))
    assert functions_in(error) == ["run", "run", "users_mistake"]
    shorten_traceback(error)
    assert functions_in(error) == ["users_mistake"]


@pytest.mark.usefixtures("short")
def test_every_frame_is_kept_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "full")
    error = raised_by(inside_vla_rl(CALL, call=users_mistake))
    shorten_traceback(error)
    assert functions_in(error) == ["run", "users_mistake"]


@pytest.mark.usefixtures("short")
def test_what_may_be_a_bug_of_vla_rl_keeps_its_traceback() -> None:
    bug = raised_by(inside_vla_rl("def run(): return 1 / 0"))
    shorten_traceback(bug)
    assert functions_in(bug) == ["run"]


@pytest.mark.usefixtures("short")
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


@pytest.mark.usefixtures("short")
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
