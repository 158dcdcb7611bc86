"""What a reply settles on is scored by name or by a function of one's own.

A scorer that hangs costs its deadline and no more.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from durations import assert_grows_in_proportion, at_some_pace

from vla_rl.errors import ConfigError, DataError, EnvError
from vla_rl.sandbox import CallResult, ProcessLimits, Sandbox, SandboxConfig
from vla_rl.scoring import Score, check_scorer, final_answer, make_scorer, scorers
from vla_rl.scoring.scorers import find_last_program


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("I think <answer>7</answer>, no: <answer> 8 </answer>", "8"),
        (r"so \boxed{\frac{1}{2}} and then \boxed{x^{2}}", "x^{2}"),
        (r"\boxed{3", r"\boxed{3"),
        ("3 + 4 = 7\n#### 7", "7"),
        ("Thinking.\nThe answer is: **Graz**", "Graz"),
        ("Final answer: 12", "12"),
        ("  42 \n", "42"),
    ],
)
def test_the_final_answer_is_what_the_reply_settles_on(reply: str, answer: str) -> None:
    assert final_answer(reply) == answer


@pytest.mark.parametrize(
    "pattern",
    ["\n", "<answer>", "<answer></answer", "\\boxed{", "Answer: x *", "#### \t", "answer \t* is"],
)
def test_the_work_for_an_answer_grows_in_proportion_to_the_reply(pattern: str) -> None:
    assert_grows_in_proportion(lambda size: final_answer(pattern * (size // len(pattern)) + "4 2"))


@pytest.mark.parametrize(
    ("begin", "pattern", "end"),
    [
        ("", "```", ""),
        ("```\n", "x", ""),
        ("```\n```", " ", "x"),
        ("", "```\n", "x"),
        ("", "`", "x`"),
    ],
)
def test_the_work_for_a_program_grows_in_proportion_to_the_reply(
    begin: str, pattern: str, end: str
) -> None:
    assert_grows_in_proportion(
        lambda size: find_last_program(begin + pattern * (size // len(pattern)) + end)
    )


def test_an_answer_after_many_openings_is_found() -> None:
    assert final_answer("\n" * 50_000 + "4 2") == "4 2"
    assert final_answer("<answer>" * 3 + "7</answer>") == "<answer><answer>7"
    assert final_answer("<answer>7</answer><answer>8") == "7"


@pytest.mark.parametrize(
    ("reply", "program"),
    [
        ("Install it:\n```bash\npip install x\n```\nthen\n```python\nprint(1)\n```", "print(1)\n"),
        ("```python\nprint(1)\n```\nIt prints:\n```\n1\n```", "print(1)\n"),
        ("```Python\nprint(1)\n```", "print(1)\n"),
        ("```py\nprint(1)\n```\nbetter:\n```python3\nprint(2)\n```\n", "print(2)\n"),
        ("```\nprint(1)\n```\n```\nprint(2)\n```\n```text\n2\n```", "print(2)\n"),
        ("1. so:\n   ```python\n   if 1:\n       print(1)\n   ```", "if 1:\n    print(1)\n"),
        ("````python\n# as in\n```\nprint(1)\n````", "# as in\n```\nprint(1)\n"),
        ("```bash\nls\n```", "```bash\nls\n```"),
        ("```python\nprint(1)```", "print(1)\n"),
        ("```python\nprint(1)\n```.", "print(1)\n"),
        ("```python\nprint(1)\n``` \t; \n", "print(1)\n"),
        ("```python\nx = 'a\u2028b'\n```", "x = 'a\u2028b'\n"),
        ("```python\r\nprint(1)\r\n```\r\n", "print(1)\n"),
        ("```python\nprint(1)", "```python\nprint(1)"),
        ("print(1)", "print(1)"),
    ],
)
def test_the_program_is_the_last_block_of_python(reply: str, program: str) -> None:
    assert find_last_program(reply) == program


SHARED = pytest.mark.asyncio(loop_scope="module")
"""For tests that share the sandbox: its call runner imports what scores mathematics for seconds."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    async with Sandbox() as sandbox:
        yield sandbox


async def score(sandbox: Sandbox, scorer: str, reply: str, answer: Any) -> Score:
    return await make_scorer(scorer)(sandbox, reply, {"answer": answer})


async def test_exact_and_match_compare_texts() -> None:
    async with Sandbox() as sandbox:
        assert (await score(sandbox, "exact", "#### 42", "42")).value == 1.0
        assert (await score(sandbox, "exact", "Graz", "graz")).value == 0.0
        assert (
            await score(sandbox, "match", "<answer>The city of Graz!</answer>", "city of graz")
        ).value == 1.0
        assert (await score(sandbox, "match", "Linz", ["Graz", "Linz"])).value == 1.0
        assert (await score(sandbox, "match", "Wien", ["Graz", "Linz"])).value == 0.0
        assert sandbox.runner_pid is None  # nothing to run


@SHARED
@pytest.mark.parametrize("name", ["exact", "match", "math"])
@pytest.mark.parametrize(
    "answer", ["48/2 = <<48/2=24>>24 clips.\n#### 72", "Answer: 72", "<answer>72</answer>"]
)
async def test_the_answer_of_a_data_set_may_be_a_whole_solution(
    name: str, answer: str, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorers, "_MATH_LIMITS", ProcessLimits(timeout_s=60.0))
    scorer, row = make_scorer(name), {"answer": answer}
    assert (await scorer(sandbox, "24 + 48\n#### 72", row)).value == 1.0
    assert (await scorer(sandbox, "24 + 48\n#### 24", row)).value == 0.0


@SHARED
async def test_math_sees_through_notation(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorers, "_MATH_LIMITS", ProcessLimits(timeout_s=60.0))
    cases = [
        (r"thus \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"The solutions are \boxed{\{3, 1\}}", r"\{1,3\}", 1.0),
        ("The answer is: 1,000", "1000", 1.0),
        (r"\boxed{3}", "4", 0.0),
        ("I do not know", "4", 0.0),
    ]
    scores = await asyncio.gather(
        *(score(sandbox, "math", reply, answer) for reply, answer, _ in cases)
    )
    assert [found.value for found in scores] == [expected for *_, expected in cases], scores
    with pytest.raises(DataError, match="is no mathematics"):
        await score(sandbox, "math", "3", "")


@SHARED
async def test_mathematics_that_is_not_done_in_time_scores_nothing(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorers, "_MATH_LIMITS", ProcessLimits(timeout_s=1e-6))
    found = await score(sandbox, "math", r"\boxed{x^2+2x+1}", "(x+1)^2")
    assert (found.value, found.fault) == (0.0, "timed_out")


TESTS = [{"stdin": "2 3\n", "stdout": "5\n"}, {"stdin": "10 -4\n", "stdout": "6\n"}]


@SHARED
async def test_code_is_scored_by_the_share_of_tests_that_pass(sandbox: Sandbox) -> None:
    right = "Like this:\n```python\nprint(sum(map(int, input().split())))\n```\nDone."
    assert await score(sandbox, "code", right, TESTS) == Score(value=1.0)
    half = await score(sandbox, "code", "```python\nprint(5)\n```", TESTS)
    assert (half.value, half.words) == (0.5, "test 1: it printed '5\\n', expected '6\\n'")
    wrong = await score(sandbox, "code", "```python\nraise SystemExit(3)\n```", TESTS)
    assert (wrong.value, wrong.fault) == (0.0, "died")
    with pytest.raises(DataError, match="is not a list of tests"):
        await score(sandbox, "code", right, "print(5)")
    with pytest.raises(DataError, match="is an empty list, expected at least one test"):
        await score(sandbox, "code", right, [])


def slow_program(seconds: float) -> str:
    return f"```python\nimport time\ntime.sleep({seconds})\nprint(5)\n```"


async def test_the_tests_of_a_row_have_a_budget_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at(scale: float) -> None:
        monkeypatch.setattr(scorers, "_CODE_BUDGET_S", 2.0 * scale)
        async with Sandbox() as sandbox:
            found = await score(
                sandbox, "code", slow_program(1.1 * scale), [{"stdin": "", "stdout": "5\n"}] * 3
            )
        assert (found.value, found.fault) == (1 / 3, "timed_out")
        assert sandbox.counts == {"done": 1, "timed_out": 1}

    monkeypatch.setattr(scorers, "_CODE_LIMITS", ProcessLimits(timeout_s=600.0, network=False))
    await at_some_pace(at)


async def test_waiting_for_a_place_in_the_sandbox_costs_no_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def at(scale: float) -> None:
        monkeypatch.setattr(scorers, "_CODE_BUDGET_S", scale)
        async with Sandbox(SandboxConfig(max_calls=1)) as sandbox:
            program, tests = slow_program(0.25 * scale), [{"stdin": "", "stdout": "5\n"}] * 2
            rows = [score(sandbox, "code", program, tests) for _ in range(4)]
            assert [found.value for found in await asyncio.gather(*rows)] == [1.0] * 4

    monkeypatch.setattr(scorers, "_CODE_LIMITS", ProcessLimits(timeout_s=600.0, network=False))
    await at_some_pace(at)


@SHARED
async def test_a_kernel_that_isolates_nothing_says_nothing_of_a_reply(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: Any) -> CallResult:
        return CallResult(fault="not_isolated", text="no namespaces")

    monkeypatch.setattr(sandbox, "run_program", refused)
    with pytest.raises(
        EnvError, match=r"was not isolated \(no namespaces\); raise user.max_user_namespaces"
    ):
        await score(sandbox, "code", "```python\nprint(5)\n```", [{"stdin": "", "stdout": "5\n"}])


async def test_a_program_that_hangs_ends_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorers, "_CODE_LIMITS", ProcessLimits(timeout_s=1.0, network=False))
    async with Sandbox() as sandbox:
        found = await score(sandbox, "code", "```python\nwhile True: pass\n```", TESTS * 10)
        assert (found.value, found.fault) == (0.0, "timed_out")
        assert sandbox.counts == {"timed_out": 1}


@SHARED
async def test_a_function_of_ones_own_scores(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = make_scorer("sample_tools:score_length")
    assert (await own(sandbox, "abc", {"length": 6})).value == 0.5
    with pytest.raises(EnvError, match=r"'sample_tools:score_length' raised KeyError: 'length'"):
        await own(sandbox, "abc", {})
    with pytest.raises(EnvError, match="returned 'good', expected a number"):
        await make_scorer("sample_tools:score_nothing")(sandbox, "abc", {})
    monkeypatch.setattr(scorers, "_OWN_LIMITS", ProcessLimits(timeout_s=0.5))
    found = await make_scorer("sample_tools:score_hangs")(sandbox, "abc", {})
    assert (found.value, found.fault) == (0.0, "timed_out")


@SHARED
@pytest.mark.parametrize(("name", "value"), [("score_nan", "nan"), ("score_inf", "inf")])
async def test_a_score_that_is_no_finite_number_names_its_scorer(
    name: str, value: str, sandbox: Sandbox
) -> None:
    with pytest.raises(EnvError, match=f"{name}' returned {value}, expected a finite number"):
        await make_scorer(f"sample_tools:{name}")(sandbox, "abc", {})


@SHARED
async def test_a_scorer_that_is_late_is_warned_of_once(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scorers, "_OWN_LIMITS", ProcessLimits(timeout_s=0.2))
    late = make_scorer("sample_tools:score_hangs")
    for _ in range(2):
        await late(sandbox, "abc", {})
    (warned,) = [each.message for each in caplog.records if "scores 0" in each.message]
    assert "'sample_tools:score_hangs'" in warned
    assert "it took longer than 0.2 s" in warned


@pytest.mark.parametrize("path", ["sample_tools:", ":score_length", "sample_tools:a:b", "a b:c"])
def test_a_path_that_names_no_function_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="expected `module:function`"):
        make_scorer(path)


def test_a_module_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"no module 'nowhere'.*run from its folder"):
        make_scorer("nowhere.mine:score")


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("sample_tools:score_noting", "has no attribute 'score_noting'"),
        ("sample_tools:score_without_arguments", "unexpected keyword argument 'reply'"),
        ("sample_tools:score_in_the_loop", "async"),
        ("sample_tools:NO_SCORER", "not callable"),
    ],
)
async def test_a_function_that_cannot_score_is_refused_before_anything_starts(
    path: str, wrong: str
) -> None:
    with pytest.raises(ConfigError, match=rf"'{path}'.*{wrong}.*\(reply: str, row: dict\)"):
        await check_scorer(path)


async def test_a_function_of_ones_own_and_every_named_scorer_are_taken() -> None:
    for name in ("sample_tools:score_length", *scorers.SCORER_NAMES):
        await check_scorer(name)


def test_an_unknown_scorer_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"scorer 'maths' is unknown; did you mean 'math'\?"):
        make_scorer("maths")
