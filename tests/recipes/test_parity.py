"""`vla-rl parity`: our own loop against itself and against a trace."""

import msgspec
import numpy as np
import pytest

from vla_rl.cli.command_line import Command, Launch
from vla_rl.errors import ConfigError
from vla_rl.evaluation.parity import read_trace, write_trace
from vla_rl.recipes import parity
from vla_rl.recipes.parity import ParityConfig, parse_way


def options(**changed) -> Command[Launch, ParityConfig]:
    short = {"step_limit": 8, "assets": "stand-ins", "decisions": 1}
    return Command(Launch(), ParityConfig(**{**short, **changed}))


@pytest.mark.slow
async def test_our_loop_equals_its_own_trace_and_a_changed_token_is_named(tmp_path, capsys) -> None:
    alone = options(first="fast", second="none", save=tmp_path, decisions=None)
    assert await parity.main(alone) == 0
    path = tmp_path / "a.jsonl"
    assert await parity.main(options(first=str(path), second="fast")) == 0
    assert "all values of 1 decisions are equal" in capsys.readouterr().out
    trace = read_trace(path)
    entries = tuple(
        msgspec.structs.replace(entry, value=entry.value + 1)
        if entry.boundary == "tokens" and isinstance(entry.value, np.ndarray)
        else entry
        for entry in trace.entries
    )
    write_trace(tmp_path / "b.jsonl", msgspec.structs.replace(trace, entries=entries))
    assert await parity.main(options(first=str(path), second=str(tmp_path / "b.jsonl"))) == 1
    said = capsys.readouterr().out
    assert "the first difference is in the tokens of decision 0" in said
    assert "usual reasons: weights" in said


async def test_a_trace_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the trace away\.jsonl does not exist"):
        await parity.main(options(first="away.jsonl"))


def test_settings_that_do_not_exist_are_refused() -> None:
    assert parse_way("fast").physics == "fast"
    assert parse_way("physics=fast,quality=exact").quality == "exact"
    with pytest.raises(ConfigError, match="expected exact, fast, or physics, quality"):
        parse_way("quick")
    with pytest.raises(ConfigError, match="physics is 'slow', expected one of 'exact', 'fast'"):
        parse_way("physics=slow")
