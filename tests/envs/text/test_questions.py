"""Tasks of one question: rows of a data set, searches, images of squares."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_tasks import ask_tool, say, spec_of

from vla_rl.envs.text import Ask, Done, TextEnvPool, TextTask, make_text_task
from vla_rl.envs.text.tasks.questions import COLOURS, draw_square, open_index
from vla_rl.errors import ConfigError, DataError
from vla_rl.types import ChoiceFormat, EnvSpec, Info, RegexFormat, ReplyOptions

ROWS = [
    {"prompt": "6x7?", "answer": "42"},
    {
        "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}],
        "answer": "2",
    },
    {"prompt": 7, "answer": "7"},
]
DOCUMENTS = [
    {"title": "Graz", "text": "Graz lies on the river Mur."},
    {"title": "Linz", "text": "Linz lies on the river Danube."},
    {"text": "Robots play chess with wooden pieces."},
]


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write(tmp_path / "rows.jsonl", ROWS)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


async def test_a_row_is_asked_answered_and_scored(data: str) -> None:
    async with (
        TextEnvPool() as pool,
        pool.lease(spec_of("text/question", options={"row": 0}, data=data)) as env,
    ):
        start = await env.reset()
        assert [(message.role, message.content) for message in start.messages] == [("user", "6x7?")]
        assert start.tools == ()
        outcome = await env.step(say("#### 42"))
        assert (outcome.reward, outcome.terminated, outcome.info["is_success"]) == (1.0, True, True)
        assert outcome.info["score"] == 1.0


async def test_the_seed_chooses_where_no_row_is_named_and_the_system_speaks_first(
    data: str,
) -> None:
    spec = spec_of("text/question", seed=4, data=data, system="Answer with a number.")
    async with TextEnvPool() as pool, pool.lease(spec) as env:
        start = await env.reset()
        assert [message.content for message in start.messages] == [
            "Answer with a number.",
            "be brief",
            "1+1?",
        ]
        assert (await env.step(say("3"))).info["is_success"] is False


async def test_a_row_is_a_whole_number_of_any_type(data: str) -> None:
    episode = spec_of("text/question", options={"row": np.int64(0)}, data=data)
    async with TextEnvPool() as pool, pool.lease(episode) as env:
        assert (await env.reset()).messages[0].content == "6x7?"


@pytest.mark.parametrize(
    ("options", "kwargs", "told"),
    [
        ({"row": 3}, {}, "row 3 of .*rows.jsonl, expected a number from 0 to 2"),
        ({"row": "a"}, {}, "row 'a' of"),
        ({"row": 2}, {}, "'prompt' of row 2 of .* is neither a text nor a list of messages"),
        (
            {},
            {"answer_field": "gold"},
            r"row 0 \(line 1\) has no 'gold'; it has: 'prompt', 'answer'",
        ),
        ({}, {"data": "no_assets.jsonl"}, "no_assets.jsonl is no file"),
    ],
)
async def test_what_is_wrong_with_the_data_is_named(
    data: str, options: dict[str, Any], kwargs: dict[str, Any], told: str
) -> None:
    async with (
        TextEnvPool() as pool,
        pool.lease(spec_of("text/question", options=options, **{"data": data, **kwargs})) as env,
    ):
        with pytest.raises(DataError, match=told):
            await env.reset()


def test_a_search_gives_the_nearest_documents_first(tmp_path: Path) -> None:
    index = open_index(write(tmp_path / "documents.jsonl", DOCUMENTS))
    found = index.search("which river flows through Graz", 2)
    assert [document.title for document in found] == ["Graz", "Linz"]
    assert found[0].score > found[1].score > 0
    assert [document.row for document in index.search("chess", 3)] == [2]
    assert index.search("zebra", 3) == []
    assert index.search("the", 3) == []
    assert open_index(tmp_path / "documents.jsonl") is index


async def test_an_answer_is_searched_for_in_several_turns(data: str, tmp_path: Path) -> None:
    questions = write(
        tmp_path / "questions.jsonl",
        [{"prompt": "Which river is in Graz?", "answer": ["Mur", "the Mur"]}],
    )
    documents = write(tmp_path / "documents.jsonl", DOCUMENTS)
    spec = spec_of("text/search", data=questions, documents=documents, max_results=1)
    async with TextEnvPool() as pool, pool.lease(spec) as env:
        start = await env.reset()
        assert [tool.name for tool in start.tools] == ["search"]
        found = await env.step(
            ask_tool(("search", '{"query": "Graz river"}'), ("search", '{"query": "zebra"}'))
        )
        assert [message.content for message in found.messages] == [
            "Graz\nGraz lies on the river Mur.",
            "nothing was found",
        ]
        assert (await env.step(say("<answer>The Mur.</answer>"))).reward == 1.0


async def test_a_row_that_the_scorer_cannot_compare_with_is_named(tmp_path: Path) -> None:
    data = write(
        tmp_path / "tests.jsonl",
        [{"prompt": "1?", "answer": "1"}, {"prompt": "2?", "answer": "print"}],
    )
    spec = spec_of("text/question", options={"row": 1}, data=data, scorer="code")
    async with TextEnvPool() as pool, pool.lease(spec) as env:
        await env.reset()
        with pytest.raises(
            DataError, match=r"'answer' of row 1 of .*tests\.jsonl: .* is not a list of tests"
        ):
            await env.step(say("print(2)"))


@pytest.mark.parametrize("question", ["side", "colour"])
async def test_only_the_word_that_describes_the_image_earns_1(question: str) -> None:
    image, colour, side = draw_square(3, 40)
    right = side if question == "side" else colour
    spec = spec_of("text/square", seed=3, question=question, size=40)
    async with TextEnvPool() as pool:
        for word in ("left", "right", *COLOURS):
            async with pool.lease(spec) as env:
                start = await env.reset()
                (shown,) = start.messages[0].images
                assert (shown == image).all()
                assert isinstance(start.options.format, ChoiceFormat)
                assert right in start.options.format.choices
                outcome = await env.step(say(f" {word.title()}"))
                assert (outcome.reward, outcome.terminated) == (float(word == right), True)


class Counted(TextTask):
    """Asks twice, each time with another rule."""

    async def setup(self, seed: int, options: Info) -> Ask:
        return Ask("a?", options=ReplyOptions(format=RegexFormat(pattern="a")))

    async def reply(self, text: str) -> Ask | Done:
        return Ask("b?") if text == "a" else Done(1.0, is_success=True)


async def test_rules_of_a_question_are_for_its_reply_alone_and_hold_after_tools() -> None:
    async with TextEnvPool() as pool, pool.lease(spec_of(f"{__name__}:Counted")) as env:
        start = await env.reset()
        assert start.options.format == RegexFormat(pattern="a")
        called = await env.step(ask_tool(errors=("a tool call is not JSON",)))
        assert called.options == start.options
        assert (await env.step(say("a"))).options.format is None


def test_an_image_too_small_for_a_square_is_refused() -> None:
    with pytest.raises(ConfigError, match="size=4: expected an image of at least 8 pixels"):
        make_text_task(EnvSpec(id="text/square", kwargs={"size": 4}))
