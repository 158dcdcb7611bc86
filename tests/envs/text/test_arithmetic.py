"""The arithmetic tasks: problems from the seed, one operation a call, an answer that is checked,
credit for two.
"""

import json

import pytest
from text_episodes import say, spec_of

from vla_rl.envs.text import TextEnvPool, make_text_task
from vla_rl.envs.text.tasks.arithmetic import calculate, draw_problem
from vla_rl.errors import ConfigError
from vla_rl.types import EnvSpec, Message, TextEnv, TextOutcome, ToolCall


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


async def play_pair(*replies: str, **kwargs: object) -> list[TextOutcome]:
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
    outcomes = await play_pair("1", "n", RIGHT, "y")
    assert [outcome.agent for outcome in outcomes] == ["checker", "solver", "checker", "checker"]
    assert [outcome.messages[0].content for outcome in outcomes[:3]] == [
        f"{TEXT}=1?",
        "n",
        f"{TEXT}={RIGHT}?",
    ]
    assert outcomes[0].tools[0].name == "calc"


async def test_a_team_earns_the_same_and_only_for_success() -> None:
    outcomes = await play_pair("1", "n", RIGHT, "y")
    assert [outcome.reward for outcome in outcomes] == [0.0, 0.0, 0.0, 1.0]
    assert outcomes[-1].info["rewards"] == {"solver": 1.0, "checker": 1.0}
    assert (outcomes[-1].reward, outcomes[-1].credits) == (1.0, {"solver": 1.0})
    assert outcomes[-1].info["is_success"]
    wrong = await play_pair("1", "y")
    assert wrong[-1].info["rewards"] == {"solver": 0.0, "checker": 0.0}
    doubted = await play_pair("1", "n", RIGHT, "n")
    assert not doubted[-1].info["is_success"]


async def test_with_credit_of_their_own_each_earns_for_what_it_did() -> None:
    fooled = await play_pair(RIGHT, "n", RIGHT, "y", credit="own")
    assert [outcome.reward for outcome in fooled] == [0.0, 0.0, 0.0, 0.5]
    assert fooled[-1].info["rewards"] == {"solver": 1.0, "checker": 0.5}
    early = await play_pair(RIGHT, "y", credit="own")
    assert early[-1].info["rewards"] == {"solver": 1.0, "checker": 1.0}
    lazy = await play_pair("1", "y", credit="own")
    assert lazy[-1].info["rewards"] == {"solver": 0.0, "checker": 0.0}
