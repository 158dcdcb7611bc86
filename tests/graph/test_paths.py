"""Functions by path."""

import asyncio
from typing import Any

import pytest

from vla_rl.graph import (
    GraphError,
    Pipeline,
    UnknownFunction,
)


def refused(pipeline: Pipeline, error: type[GraphError], *words: str) -> None:
    """Building raises exactly `error`, and its message has all the words."""
    with pytest.raises(error) as caught:
        pipeline.build()
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("asyncio:slep", ("'asyncio' has no function 'slep'", "did you mean 'sleep'?")),
        ("asyncio.taks:sleep", ("'asyncio.taks' cannot be found", "did you mean 'asyncio.tasks'?")),
        ("asynci:sleep", ("'asynci' cannot be found", "did you mean 'asyncio'?")),
        ("asyncio.sleep", ("expected 'module:name', such as 'asyncio:sleep'",)),
        ("asyncio:", ("expected 'module:name'",)),
        ("asyncio:Queue.gett", ("has no function 'Queue.gett'", "did you mean 'get'?")),
    ],
)
def test_an_unknown_function_path_is_refused(path: str, words: tuple[str, ...]) -> None:
    refused(Pipeline("p").add_node("a", path), UnknownFunction, "node 'a'", *words)


def test_an_error_inside_the_functions_own_module_is_not_hidden(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        Pipeline("p").add_node("a", "needs_more:f").build()


def test_a_function_by_path_is_resolved() -> None:
    graph = Pipeline("p").add_node("nap", "asyncio:sleep", config={"delay": 0}).build()
    assert graph.nodes["nap"].func is asyncio.sleep
