"""A function with type hints and a docstring is a tool.

Whatever a model or the tool does wrong is in the answer.
"""

import asyncio
import fractions
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import sample_tools
from sample_tasks import ask_tool

from vla_rl.envs.text import Sandbox, TextLimits, Toolbox

TOOLS = (
    sample_tools.weather,
    sample_tools.slow,
    sample_tools.broken,
    sample_tools.hangs,
    sample_tools.loud,
    sample_tools.forks,
    sample_tools.crashes,
    sample_tools.words,
    sample_tools.plan,
    sample_tools.opens_a_name,
)


SHARED = pytest.mark.asyncio(loop_scope="module")
"""For tests that share the toolbox, whose sandbox imports the tools once."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def toolbox() -> AsyncIterator[Toolbox]:
    async with Sandbox() as sandbox:
        yield Toolbox(TOOLS, sandbox, TextLimits(tool_timeout_s=30.0, max_answer_characters=200))


def test_the_schema_comes_from_the_hints_and_the_words_from_the_docstring() -> None:
    (tool,) = Toolbox([sample_tools.weather], Sandbox()).list_tools()
    assert (tool.name, tool.description) == ("weather", "The weather in a city.")
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "its name."},
            "days": {"type": "integer", "description": "from today on, at most 7.", "default": 1},
            "unit": {"enum": ["C", "F"], "default": "C"},
        },
        "required": ["city"],
        "additionalProperties": False,
    }


@SHARED
async def test_a_call_gives_text_as_it_is_and_all_else_as_json(toolbox: Toolbox) -> None:
    answer = await toolbox.aexecute("weather", '{"city": "Graz", "days": 2}')
    assert (answer.text, answer.fault) == ('{"city":"Graz","degrees":[20,20],"unit":"C"}', None)
    assert (
        await toolbox.aexecute("weather", {"city": "Graz"})
    ).text == '{"city":"Graz","degrees":[20],"unit":"C"}'
    assert (await toolbox.aexecute("words", {"count": 2})).text == "word word "


@pytest.mark.parametrize(
    ("name", "arguments", "fault", "told"),
    [
        ("wether", "{}", "unknown_tool", "there is no tool 'wether'; did you mean 'weather'?"),
        ("weather", "{city: 1}", "bad_arguments", "JSON is malformed"),
        ("weather", "", "bad_arguments", "missing required field `city`"),
        ("weather", "[1]", "bad_arguments", "Expected `object`, got `array`"),
        (
            "weather",
            '{"city": 3}',
            "bad_arguments",
            'Expected `str`, got `int` - at `$.city`; expected {"city": string',
        ),
        ("weather", '{"city": "Graz", "town": 1}', "bad_arguments", "unknown field `town`"),
        ("weather", '{"city": "Graz", "unit": "K"}', "bad_arguments", "Invalid enum value 'K'"),
        ("weather", '{"city": "\\ud800"}', "bad_arguments", "error"),
        ("weather", "[" * 100_000, "bad_arguments", "error"),
        ("broken", "{}", "raised", "error: KeyError: 'nothing'"),
        ("loud", "{}", "printed_too_much", "it printed more than 1024 KiB and was stopped"),
        ("forks", "{}", "raised", "BlockingIOError"),
        ("crashes", "{}", "died", "its process ended with exit code 3"),
    ],
)
@SHARED
async def test_whatever_is_wrong_is_in_the_answer(
    toolbox: Toolbox, name: str, arguments: str, fault: str, told: str
) -> None:
    answer = await toolbox.aexecute(name, arguments)
    assert answer.fault == fault
    assert told in answer.text
    assert answer.text.startswith("error: ")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("slow", "error: 'slow' took longer than 2 s and was stopped"),
        ("hangs", "error: it took longer than 2 s and was stopped"),
    ],
)
async def test_a_tool_that_takes_too_long_is_stopped(name: str, told: str) -> None:
    async with asyncio.timeout(60), Sandbox() as sandbox:
        answer = await Toolbox(TOOLS, sandbox, TextLimits(tool_timeout_s=2.0)).aexecute(name, "{}")
    assert (answer.fault, answer.text) == ("timed_out", told)


@SHARED
async def test_a_plain_function_is_handed_the_structs_that_its_hints_name(toolbox: Toolbox) -> None:
    arguments = '{"trip": {"city": "Graz"}, "others": [{"city": "Linz", "days": 2}]}'
    answer = await toolbox.aexecute("plan", arguments)
    assert (answer.text, answer.fault) == ("1 in Graz, 2 in Linz", None)


@SHARED
async def test_a_long_answer_is_cut_and_says_so(toolbox: Toolbox) -> None:
    answer = await toolbox.aexecute("words", {"count": 1000})
    assert answer.text == ("word " * 40) + "\n[4800 more characters were left out]"


@SHARED
async def test_the_message_that_answers_a_call_names_it(toolbox: Toolbox) -> None:
    (call,) = ask_tool(("weather", '{"city": "Graz"}')).tool_calls
    message, _ = await toolbox.answer(call)
    assert (message.role, message.tool_call_id, message.name) == ("tool", "0", "weather")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise LookupError("no words")


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ("half a pair: \ud835", "half a pair: \ufffd"),
        (["\ud835", {"caf\udce9": 1}], '["\ufffd",{"caf\ufffd":1}]'),
        (np.int64(3), "3"),
        ([np.float32(0.5), np.arange(2)], "[0.5,[0,1]]"),
        (pathlib.Path("a/caf\udce9"), "a/caf\ufffd"),
        ({"share": fractions.Fraction(1, 3), "among": {7}}, '{"share":"1/3","among":[7]}'),
        (10**30, str(10**30)),
        (None, "null"),
    ],
)
async def test_a_result_is_text_or_json_that_can_be_encoded(returned: Any, text: str) -> None:
    async def look() -> Any:
        """Look."""
        return returned

    answer = await Toolbox([look], Sandbox()).aexecute("look", "{}")
    assert (answer.text, answer.fault) == (text, None)


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (FileNotFoundError("caf\udce9.txt"), "error: FileNotFoundError: caf\ufffd.txt"),
        (SystemExit(3), "error: SystemExit: 3"),
        (asyncio.CancelledError("of its own"), "error: CancelledError: of its own"),
        (Unspeakable(), "error: Unspeakable: (its __str__ raised LookupError)"),
        (BaseExceptionGroup("several", [SystemExit(1)]), "error: BaseExceptionGroup: several"),
    ],
)
async def test_the_model_reads_whatever_a_tool_raises(raised: BaseException, told: str) -> None:
    async def look() -> str:
        """Look."""
        raise raised

    answer = await Toolbox([look], Sandbox()).aexecute("look", "{}")
    assert answer.text.startswith(told)
    assert answer.fault == "raised"


@pytest.mark.parametrize("returned", [object(), [object()], {(1, 2): 3}, print])
async def test_a_result_that_is_neither_text_nor_json_is_a_fault_of_the_tool(returned: Any) -> None:
    async def look() -> Any:
        """Look."""
        return returned

    answer = await Toolbox([look], Sandbox()).aexecute("look", "{}")
    assert answer.text.startswith("error: TypeError: ")
    assert answer.fault == "raised"


async def test_a_result_nested_without_end_is_a_fault_of_the_tool() -> None:
    async def look() -> Any:
        """Look."""
        nested: list[Any] = []
        for _ in range(100_000):
            nested = [nested]
        return nested

    answer = await Toolbox([look], Sandbox()).aexecute("look", "{}")
    assert answer.fault == "raised"


@SHARED
async def test_a_process_that_raises_with_half_a_surrogate_pair_tells_its_words(
    toolbox: Toolbox,
) -> None:
    answer = await toolbox.aexecute("opens_a_name", "{}")
    assert (answer.text, answer.fault) == ("error: FileNotFoundError: caf\ufffd", "raised")


@SHARED
async def test_cancelling_a_call_is_no_fault_of_the_tool(toolbox: Toolbox) -> None:
    task = asyncio.create_task(toolbox.aexecute("slow", "{}"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def local() -> Callable[..., Any]:
    def inside() -> str:
        """Is inside."""
        return ""

    return inside


async def without_hint(x) -> str:  # type: ignore[no-untyped-def]
    """Says nothing of x."""
    return str(x)


async def without_words(x: int) -> str:
    return str(x)


async def with_many(*xs: int) -> str:
    """Takes any number."""
    return str(xs)


async def with_object(x: Callable[[], None]) -> str:
    """Takes what JSON cannot have."""
    return str(x)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (local(), "put it at the top of a module, or make it `async def`"),
        (without_hint, "parameter 'x' of tool 'without_hint' has no type hint"),
        (without_words, "tool 'without_words' has no docstring"),
        (with_many, "expected parameters that can be given by name"),
        (with_object, "has a type hint that JSON cannot represent"),
    ],
)
def test_a_function_that_is_no_tool_is_refused_with_what_it_lacks(
    function: Callable[..., Any], told: str
) -> None:
    with pytest.raises(TypeError, match=told):
        Toolbox([function], Sandbox())


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two tools are named 'weather'"):
        Toolbox([sample_tools.weather, sample_tools.weather], Sandbox())
