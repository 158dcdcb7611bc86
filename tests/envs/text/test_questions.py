"""Tasks that ship: sums of one agent or two, rows of a data set, searches, images of squares."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_tasks import ask_tool, say, spec_of

from vla_rl.datasets.prompts import read_prompts
from vla_rl.envs.text import Ask, Done, TextEnvPool, TextTask, make_text_task
from vla_rl.envs.text.arithmetic import calculate, draw_problem
from vla_rl.envs.text.arithmetic_conversations import (
    TOOLS,
    UNREADABLE,
    draw_conversation,
    draw_pair_conversation,
)
from vla_rl.envs.text.questions import open_index
from vla_rl.errors import ConfigError, DataError
from vla_rl.recipes.grpo_prompts import GrpoPromptsConfig
from vla_rl.recipes.sft_text import SftTextConfig, make_conversation
from vla_rl.types import (
    EnvSpec,
    Info,
    Message,
    RegexFormat,
    ReplyOptions,
    TextEnv,
    TextOutcome,
    ToolCall,
)

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
            r"row 0 \(line 1\) has no 'gold'; known: 'prompt', 'answer'",
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


def count_words(reply: str, row: dict[str, Any]) -> float:
    return len(reply.split()) / row["wanted"]


async def test_a_scorer_of_ones_own_needs_no_answer(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", [{"prompt": "Tell a story.", "wanted": 4}])
    spec = spec_of("text/question", data=data, scorer=f"{__name__}:count_words")
    async with TextEnvPool() as pool, pool.lease(spec) as env:
        await env.reset()
        assert (await env.step(say("once upon a time"))).reward == 1.0
    config = GrpoPromptsConfig(prompts=data, scorer=f"{__name__}:count_words")
    assert config.columns == ("prompt",)
    with pytest.raises(DataError, match="has no 'answer'"):
        read_prompts(data, GrpoPromptsConfig(prompts=data, scorer="exact").columns)


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


def call(expression: str) -> Message:
    arguments = json.dumps({"e": expression})
    return Message(
        role="assistant", tool_calls=(ToolCall(id="1", name="calc", arguments=arguments),)
    )


async def work_out(
    env: TextEnv, seed: int, *, num_operators: int = 2, operators: str = "+-"
) -> list[TextOutcome]:
    """Call the calculator once for each operation."""
    problem = draw_problem(seed, num_operators=num_operators, num_digits=2, operators=operators)
    outcomes = [await env.step(call(operation)) for operation, _ in problem.steps]
    assert [outcome.messages[0].content for outcome in outcomes] == [
        str(value) for _, value in problem.steps
    ]
    return outcomes


@pytest.mark.parametrize("operators", ["+-", "*+-", "*"])
def test_a_problem_has_the_value_that_the_usual_rules_give(operators: str) -> None:
    for seed in range(200):
        problem = draw_problem(seed, num_operators=3, num_digits=2, operators=operators)
        assert problem.value == eval(problem.text)
        assert problem.value >= 0
        assert len(problem.steps) == 3
        assert problem.steps[-1][1] == problem.value


def test_the_seed_is_the_problem() -> None:
    problems = [
        draw_problem(seed, num_operators=2, num_digits=2, operators="+-").text
        for seed in range(100)
    ]
    assert problems == [
        draw_problem(seed, num_operators=2, num_digits=2, operators="+-").text
        for seed in range(100)
    ]
    assert len(set(problems)) == 100


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("23+58", 81),
        ("7 - 12", -5),
        ("-5*3", -15),
        ("1+2+3", None),
        ("", None),
        ("2**9", None),
        ("1" * 40 + "+1", None),
    ],
)
def test_the_calculator_does_one_operation(expression: str, value: int | None) -> None:
    assert calculate(expression) == value


async def test_a_sum_worked_out_with_the_calculator_is_a_success() -> None:
    async with TextEnvPool() as pool, pool.lease(spec_of("text/arithmetic", seed=7)) as env:
        start = await env.reset()
        problem = draw_problem(7, num_operators=2, num_digits=2, operators="+-")
        assert start.messages == (Message(role="user", content=f"{problem.text}=?"),)
        assert [tool.name for tool in start.tools] == ["calc"]
        await work_out(env, 7)
        outcome = await env.step(say(str(problem.value)))
        assert (outcome.reward, outcome.terminated, outcome.truncated) == (1.0, True, False)
        assert outcome.info["is_success"] is True
        assert outcome.info["num_calculations"] == 2


async def test_a_right_answer_without_the_calculator_is_no_success_unless_that_is_asked_for() -> (
    None
):
    answer = str(draw_problem(3, num_operators=2, num_digits=2, operators="+-").value)
    async with TextEnvPool() as pool:
        async with pool.lease(spec_of("text/arithmetic", seed=3)) as env:
            await env.reset()
            outcome = await env.step(say(answer))
            assert (outcome.reward, outcome.info["is_right"], outcome.info["is_success"]) == (
                0.0,
                True,
                False,
            )
        async with pool.lease(spec_of("text/arithmetic", seed=3, min_tool_calls=0)) as env:
            await env.reset()
            assert (await env.step(say(answer))).reward == 1.0


@pytest.mark.parametrize("reply", ["", "the answer is 81", "1e2", "eighty", "9" * 5000])
async def test_anything_but_the_number_is_wrong(reply: str) -> None:
    async with TextEnvPool() as pool, pool.lease(spec_of("text/arithmetic", seed=3)) as env:
        await env.reset()
        await work_out(env, 3)
        outcome = await env.step(say(reply))
        assert (outcome.reward, outcome.terminated) == (0.0, True)


async def test_difficulty_is_in_the_arguments() -> None:
    async with TextEnvPool() as pool:
        spec = spec_of(
            "text/arithmetic", seed=1, num_operators=4, num_digits=3, operators="*", max_turns=5
        )
        async with pool.lease(spec) as env:
            text = (await env.reset()).messages[0].content
            assert text.count("*") == 4
            assert len(text.removesuffix("=?")) == 5 * 3 + 4
            for _ in range(4):
                assert not (await env.step(call("1+1"))).truncated
            assert (await env.step(call("1+1"))).truncated


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_operators": 0},
        {"num_digits": 9},
        {"operators": "+/"},
        {"operators": ""},
        {"credit": "none"},
    ],
)
def test_a_difficulty_that_cannot_be_drawn_is_refused(kwargs: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        make_text_task(EnvSpec(id="text/arithmetic_pair", kwargs=kwargs))


async def run_pair(*replies: str, **kwargs: object) -> list[TextOutcome]:
    async with (
        TextEnvPool() as pool,
        pool.lease(spec_of("text/arithmetic_pair", seed=5, **kwargs)) as env,
    ):
        start = await env.reset()
        assert start.agent == "solver"
        return [await env.step(say(reply)) for reply in replies]


RIGHT = str(draw_problem(5, num_operators=1, num_digits=2, operators="+-").value)
TEXT = draw_problem(5, num_operators=1, num_digits=2, operators="+-").text


async def test_solver_and_checker_take_turns_in_conversations_of_their_own() -> None:
    outcomes = await run_pair("1", "n", RIGHT, "y")
    assert [outcome.agent for outcome in outcomes] == ["checker", "solver", "checker", "checker"]
    assert [outcome.messages[0].content for outcome in outcomes[:3]] == [
        f"{TEXT}=1?",
        "n",
        f"{TEXT}={RIGHT}?",
    ]
    assert outcomes[0].tools[0].name == "calc"


async def test_a_team_earns_the_same_and_only_for_success() -> None:
    outcomes = await run_pair("1", "n", RIGHT, "y")
    assert [outcome.reward for outcome in outcomes] == [0.0, 0.0, 0.0, 1.0]
    assert outcomes[-1].info["rewards"] == {"solver": 1.0, "checker": 1.0}
    assert (outcomes[-1].reward, outcomes[-1].credits) == (1.0, {"solver": 1.0})
    assert outcomes[-1].info["is_success"]
    wrong = await run_pair("1", "y")
    assert wrong[-1].info["rewards"] == {"solver": 0.0, "checker": 0.0}
    doubted = await run_pair("1", "n", RIGHT, "n")
    assert not doubted[-1].info["is_success"]


async def test_with_credit_of_their_own_each_earns_for_what_it_did() -> None:
    fooled = await run_pair(RIGHT, "n", RIGHT, "y", credit="own")
    assert [outcome.reward for outcome in fooled] == [0.0, 0.0, 0.0, 0.5]
    assert fooled[-1].info["rewards"] == {"solver": 1.0, "checker": 0.5}
    early = await run_pair(RIGHT, "y", credit="own")
    assert early[-1].info["rewards"] == {"solver": 1.0, "checker": 1.0}
    lazy = await run_pair("1", "y", credit="own")
    assert lazy[-1].info["rewards"] == {"solver": 0.0, "checker": 0.0}


ONE_AGENT = {"num_operators": 2, "num_digits": 1, "operators": "+-"}


def solves(chat: Sequence[Message]) -> bool:
    """As the environment judges: the right number, after as many calculations as there are
    operators.
    """
    left, *rest = chat[0].content.removesuffix("=?").replace("-", " -").replace("+", " +").split()
    value = int(left) + sum(int(part) for part in rest)
    return chat[-1].content == str(value) and sum(message.role == "tool" for message in chat) >= 2


def operation_of(message: Message) -> str:
    (call,) = message.tool_calls
    return call.arguments.removeprefix('{"e": "').removesuffix('"}')


def test_without_mistakes_every_sum_is_solved_in_three_turns() -> None:
    chats = [draw_conversation(seed, **ONE_AGENT, mistakes=0.0) for seed in range(50)]  # type: ignore[arg-type]
    assert all(solves(chat) for chat in chats)
    assert {tuple(message.role for message in chat) for chat in chats} == {
        ("user", "assistant", "tool", "assistant", "tool", "assistant")
    }


def test_with_mistakes_some_are_solved_and_the_calculator_still_tells_the_truth() -> None:
    chats = [draw_conversation(seed, **ONE_AGENT, mistakes=0.35) for seed in range(400)]  # type: ignore[arg-type]
    assert 0.25 < sum(map(solves, chats)) / len(chats) < 0.55
    for chat in chats:
        for call, answer in itertools.pairwise(chat):
            if answer.role == "tool":
                value = calculate(operation_of(call))
                assert answer.content == (UNREADABLE if value is None else str(value))


def test_a_conversation_ends_however_many_mistakes_are_made() -> None:
    chats = [draw_conversation(seed, **ONE_AGENT, mistakes=0.95) for seed in range(3000)]  # type: ignore[arg-type]
    assert max(len(chat) for chat in chats) <= 16
    assert all(chat[-1].content for chat in chats)


def test_the_same_seed_gives_the_same_conversation() -> None:
    first, second = (draw_conversation(7, **ONE_AGENT, mistakes=0.5) for _ in range(2))  # type: ignore[arg-type]
    assert first == second


def test_the_tool_is_the_environments_own() -> None:
    (tool,) = TOOLS
    assert tool.name == "calc"
    assert tool.parameters["required"] == ["e"]


TWO_AGENTS = {"num_operators": 1, "num_digits": 2, "operators": "+-"}


def rounds_of(chat: tuple[Message, ...]) -> list[list[Message]]:
    """Cut where somebody asks."""
    turns = [turn for turn, message in enumerate(chat) if message.role == "user"] + [len(chat)]
    return [list(chat[start:end]) for start, end in itertools.pairwise(turns)]


def made(number: int, mistakes: float) -> tuple[Message, ...]:
    return draw_pair_conversation(number, **TWO_AGENTS, mistakes=mistakes)  # type: ignore[arg-type]


def is_right(chat: tuple[Message, ...], number: int) -> list[bool]:
    """Of each round, whether its last word is what it should be."""
    problem = chat[0].content.partition("=")[0]
    value = calculate(problem)
    verdicts = []
    for messages in rounds_of(chat):
        if number % 2:
            proposal = messages[0].content.partition("=")[2].rstrip("?")
            verdicts.append(messages[-1].content == ("y" if proposal == str(value) else "n"))
        else:
            verdicts.append(messages[-1].content == str(value))
    return verdicts


def test_without_mistakes_solver_and_checker_are_always_right() -> None:
    for number in range(200):
        chat = made(number, 0.0)
        assert all(is_right(chat, number))
        # the checker takes the proposal away from what it worked out
        num_calls = 2 if number % 2 else 1
        for messages in rounds_of(chat):
            assert [message.role for message in messages] == [
                "user",
                *["assistant", "tool"] * num_calls,
                "assistant",
            ]


def test_with_mistakes_both_are_right_about_half_of_the_time() -> None:
    for role in (0, 1):
        verdicts = [
            right
            for number in range(role, 800, 2)
            for right in is_right(made(number, 0.35), number)
        ]
        assert 0.4 < sum(verdicts) / len(verdicts) < 0.9


def test_the_checker_sees_right_and_wrong_proposals_and_the_solver_hears_no() -> None:
    answers = {chat[-1].content for number in range(1, 100, 2) for chat in [made(number, 0.0)]}
    assert answers == {"y", "n"}
    second_rounds = [
        rounds_of(made(number, 0.0))[1][0].content
        for number in range(0, 100, 2)
        if len(rounds_of(made(number, 0.0))) > 1
    ]
    assert second_rounds
    assert set(second_rounds) == {"n"}


@pytest.mark.parametrize(
    "fields", [{"num_digits": 0}, {"num_digits": 300}, {"num_operators": 0}, {"operators": "%"}]
)
def test_the_supervised_recipe_refuses_sums_that_its_environment_does_not_ask(
    fields: dict[str, Any],
) -> None:
    with pytest.raises(ConfigError, match=r"expected 1 to 8 operators out of .* 1 to 6 digits"):
        SftTextConfig(**fields)


def test_the_supervised_recipe_trains_either_task_and_the_single_agents_by_default() -> None:
    alone = {make_conversation(SftTextConfig(), number)[0].content[-2:] for number in range(20)}
    assert alone == {"=?"}
    pair = SftTextConfig(task="arithmetic_pair", num_operators=1)
    asked = [make_conversation(pair, number)[0].content for number in range(40)]
    assert any(text.endswith("=?") for text in asked)
    assert any(not text.endswith("=?") for text in asked)
