"""Traces: written, read back, and refused with the line and the reason if they are wrong."""

import re
from pathlib import Path

import numpy as np
import pytest

from vla_rl.errors import DataError
from vla_rl.evaluation.parity import Trace, TraceEntry, compare, read_trace, write_trace

PAGE = Path(__file__).parents[3] / "docs" / "parity.md"


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    pictures = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    written = Trace(
        "mine",
        (
            TraceEntry(0, "instruction", "open it"),
            TraceEntry(0, "camera", pictures, "image"),
            TraceEntry(0, "tokens", np.array([5, 6])),
            TraceEntry(1, "success", True),
        ),
    )
    write_trace(tmp_path / "a.jsonl", written)
    read = read_trace(tmp_path / "a.jsonl")
    assert (read.source, len(read.entries)) == ("mine", 4)
    assert compare(written, read).difference is None
    found = read.entries[1].value
    assert isinstance(found, np.ndarray)
    assert (found.dtype, found.shape) == (np.dtype(np.uint8), (2, 4, 3))


HEAD = '{"parity": 1}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1 is not JSON"),
        (
            '{"parity": 1, "source": null}\n{"decision": 0, "boundary": "tokens", "value": [1]}\n',
            "source of .*:1 is None, a NoneType, expected a text",
        ),
        (
            HEAD + '{"decision": 0, "boundary": "camera", "key": ["a"], "value": [1]}\n',
            r"key of .*:2 is \['a'\], a list, expected a text",
        ),
        ('{"parity": 2}\n', ":1 is not the head of a trace"),
        (HEAD, "holds no values"),
        (HEAD + "[1]\n", ":2 is a list, expected a JSON object"),
        (HEAD + '{"decision": 0, "boundary": "camera"}\n', ":2 has the fields"),
        (HEAD + '{"decision": 0, "boundary": "wheel", "value": 1}\n', "'wheel', expected one of"),
        (HEAD + '{"decision": -1, "boundary": "tokens", "value": [1]}\n', "decision is -1"),
        (HEAD + '{"decision": true, "boundary": "tokens", "value": [1]}\n', "decision is True"),
        (HEAD + '{"decision": 0, "boundary": "tokens", "value": [[1], 2]}\n', "cannot be read"),
        (HEAD + '{"decision": 0, "boundary": "tokens", "value": [null]}\n', "expected numbers"),
        (
            HEAD + '{"decision": 0, "boundary": "camera", "value": {"dtype": "object",'
            ' "shape": [1], "base64": "AA=="}}\n',
            "dtype is 'object'",
        ),
        (
            HEAD + '{"decision": 0, "boundary": "camera", "value": {"dtype": "uint8",'
            ' "shape": [2], "base64": "AA=="}}\n',
            "cannot be read",
        ),
    ],
)
def test_a_wrong_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "theirs.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_trace(path)


def test_the_page_shows_how_a_loop_writes_a_trace(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    read = read_trace(tmp_path / "theirs.jsonl")
    assert [entry.boundary for entry in read.entries] == [
        "instruction",
        "camera",
        "tokens",
        "success",
    ]
