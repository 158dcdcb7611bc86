"""An episode answers whatever a model writes, counts it, and ends at its limits.

A broken task ends the run; tasks are found by id or path.
"""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sample_tasks import ask_tool, say, spec_of

import vla_rl.envs.text  # noqa: F401 - registers its tasks
from vla_rl.envs.text import (
    Done,
    TextEnvPool,
    TextPoolConfig,
    make_text_task,
    register_text_task,
    text_task_ids,
)
from vla_rl.envs.text.task import TextLimits, find_text_task
from vla_rl.errors import ActorFrozen, ConfigError, EnvError
from vla_rl.types import EnvPool, EnvSpec, TextEnv, WrapperSpec

ECHO = "sample_tasks:EchoTask"


async def test_a_conversation_goes_on_until_the_task_says_it_is_done() -> None:
    async with TextEnvPool() as pool, pool.lease(spec_of(ECHO, seed=4, options={"row": 2})) as env:
        start = await env.reset()
        assert start.messages[0].content == "seed 4, options {'row': 2}"
        assert len(start.tools) == 8
        first = await env.step(say("hello"))
        assert (first.messages[0].content, first.reward, first.terminated) == (
            "you said hello",
            0.25,
            False,
        )
        last = await env.step(say("bye"))
        assert (last.reward, last.terminated, last.info["stop"], last.info["last"]) == (
            1.0,
            True,
            "finished",
            "bye",
        )
        assert last.info["rewards"] == {"policy": 1.25}
        assert last.info["num_turns"] == 2


async def test_a_done_without_success_ends_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reply(_self: Any, text: str) -> Done:
        found: Any = re.search("yes", text)
        return Done(0.0, is_success=found)

    async with TextEnvPool() as pool, pool.lease(spec_of(ECHO)) as env:
        monkeypatch.setattr(find_text_task(ECHO), "reply", reply)
        await env.reset()
        last = await env.step(say("no"))
        assert (last.terminated, last.info["is_success"], last.info["stop"]) == (
            True, False, "finished",
        )  # fmt: skip


async def test_calls_of_one_reply_run_together_and_are_answered_in_order() -> None:
    async with TextEnvPool() as pool, pool.lease(spec_of(ECHO)) as env:
        await env.reset()
        calls = ask_tool(
            ("weather", '{"city": "Graz"}'),
            ("no", "{}"),
            ("words", '{"count": 1}'),
            errors=("not closed",),
        )
        outcome = await env.step(calls)
        assert [message.role for message in outcome.messages] == ["tool"] * 4
        assert outcome.messages[0].content == "error: not closed"
        assert [message.tool_call_id for message in outcome.messages[1:]] == ["0", "1", "2"]
        assert outcome.messages[3].content == "word "
        assert outcome.info["tool_faults"] == {"unreadable": 1, "unknown_tool": 1}
        assert outcome.info["num_tool_calls"] == 3
        assert not outcome.terminated
        assert not outcome.truncated


async def test_an_unreadable_call_is_no_final_answer() -> None:
    async with TextEnvPool() as pool, pool.lease(spec_of(ECHO, num_replies=1)) as env:
        await env.reset()
        outcome = await env.step(ask_tool(errors=("JSON is malformed",)))
        assert outcome.messages[0].content == "error: JSON is malformed"
        assert not outcome.terminated


async def test_half_a_surrogate_pair_is_replaced_in_what_a_task_and_a_reply_say() -> None:
    async with TextEnvPool() as pool, pool.lease(spec_of(ECHO, num_replies=2)) as env:
        await env.reset()
        outcome = await env.step(say("half a pair: \ud835"))
        assert "half a pair: \ufffd" in outcome.messages[0].content


@pytest.mark.parametrize(
    ("limits", "replies", "stop"),
    [
        ({"max_turns": 2}, [say("a"), say("b")], "max_turns"),
        (
            {"max_tool_calls": 1},
            [ask_tool(("broken", "{}")), ask_tool(("broken", "{}"))],
            "max_tool_calls",
        ),
        ({"max_characters": 300}, [say("a"), say("b" * 300)], "max_characters"),
    ],
)
async def test_a_limit_cuts_an_episode_off(
    limits: dict[str, int], replies: list[Any], stop: str
) -> None:
    async with (
        TextEnvPool() as pool,
        pool.lease(spec_of(ECHO, num_replies=9, limits=limits)) as env,
    ):
        await env.reset()
        outcomes = [await env.step(reply) for reply in replies]
        assert not outcomes[0].truncated
        assert (outcomes[-1].truncated, outcomes[-1].terminated, outcomes[-1].info["stop"]) == (
            True,
            False,
            stop,
        )
        assert outcomes[-1].info["is_success"] is False
        with pytest.raises(RuntimeError, match="is over"):
            await env.step(say("more"))


async def test_a_right_answer_in_the_last_turn_counts() -> None:
    async with (
        TextEnvPool() as pool,
        pool.lease(spec_of(ECHO, num_replies=1, limits={"max_turns": 1})) as env,
    ):
        await env.reset()
        outcome = await env.step(say("a"))
        assert (outcome.terminated, outcome.truncated) == (True, False)


@pytest.mark.parametrize(
    ("fault", "error", "told"),
    [
        ("setup raises", EnvError, "MisbehavingTask.setup raised ZeroDivisionError"),
        ("setup hangs", ActorFrozen, "setup took longer than setup_timeout_s=0.05"),
        ("setup says nothing", EnvError, "MisbehavingTask.setup returned no message"),
        ("setup gives a number", EnvError, "setup returned int, expected Ask or a text"),
        (
            "a tool without a name",
            EnvError,
            "has a tool that cannot be used: a tool is named '<lambda>'",
        ),
        ("reply raises", EnvError, "MisbehavingTask.reply raised LookupError: no row"),
        ("reply hangs", ActorFrozen, "reply took longer than reply_timeout_s=0.05"),
        ("reply gives a text", EnvError, "reply returned str, expected Ask or Done"),
        ("reply asks a stranger", EnvError, "asks agent 'stranger', expected one of its agents"),
        ("reply pays a stranger", EnvError, "rewards agent 'stranger'"),
        ("reply says a number", EnvError, "MisbehavingTask says 3, expected a text or messages"),
        ("reply says texts", EnvError, "MisbehavingTask says 'again', expected a text or messages"),
        (
            "reply says nothing",
            EnvError,
            "the content of a message of MisbehavingTask is None, a NoneType, expected a text",
        ),
        ("reply pays in words", EnvError, "rewards agent 'policy' with '1', expected a number"),
        ("reply pays nothing", EnvError, "rewards agent 'policy' with None, expected a number"),
    ],
)
async def test_a_task_that_breaks_its_contract_is_named(
    fault: str, error: type[Exception], told: str
) -> None:
    async with (
        TextEnvPool() as pool,
        pool.lease(spec_of("sample_tasks:MisbehavingTask", fault=fault)) as env,
    ):

        async def run_it() -> None:
            await env.reset()
            await env.step(say("a"))

        with pytest.raises(error, match=told):
            await run_it()


async def test_an_episode_is_reset_once_and_over_with_its_lease() -> None:
    async with TextEnvPool() as pool:
        async with pool.lease(spec_of(ECHO)) as env:
            with pytest.raises(RuntimeError, match=r"is new; call reset\(\)"):
                await env.step(say("a"))
            await env.reset()
            with pytest.raises(RuntimeError, match="an episode is reset once"):
                await env.reset()
        with pytest.raises(RuntimeError, match="is over"):
            await env.step(say("a"))


async def test_a_pool_leases_so_many_at_a_time_and_the_next_one_waits() -> None:
    async with TextEnvPool(TextPoolConfig(num_envs=1)) as pool:
        as_protocol: EnvPool = pool
        assert as_protocol.num_envs == 1
        second_began = asyncio.Event()

        async def second() -> None:
            async with pool.lease(spec_of(ECHO, seed=1)):
                second_began.set()

        async with pool.lease(spec_of(ECHO)) as env:
            as_env: TextEnv = env
            assert as_env.episode.task == ECHO
            task = asyncio.create_task(second())
            await asyncio.sleep(0)
            assert not second_began.is_set()
        await task
        assert pool.metrics()["text/leases"] == 2.0


async def test_a_pool_that_is_not_open_says_so() -> None:
    pool = TextEnvPool()
    with pytest.raises(RuntimeError, match="use `async with`"):
        async with pool.lease(spec_of(ECHO)):
            pass


async def test_wrong_names_and_arguments_are_refused_when_a_pool_is_opened() -> None:
    with pytest.raises(
        ConfigError, match=r"'text/arithmetics' is unknown; did you mean 'text/arithmetic'\?"
    ):
        await TextEnvPool(specs=[EnvSpec(id="text/arithmetics")]).__aenter__()


@pytest.mark.parametrize(
    ("env_id", "kwargs", "told"),
    [
        (
            "text/arithmetic",
            {"num_digit": 2},
            r"argument of 'text/arithmetic' 'num_digit' is unknown; did you mean 'num_digits'\?",
        ),
        (
            "text/arithmetic",
            {"num_digits": "2"},
            "'num_digits' of 'text/arithmetic' is '2': Expected `int`, got `str`",
        ),
        (
            "text/question",
            {},
            "cannot be made from {}: .*missing 1 required positional argument: 'data'",
        ),
        (
            "text/question",
            {"data": "x", "scorer": "mat"},
            r"scorer 'mat' is unknown; did you mean 'math'\?",
        ),
        ("sample_tasks:EchoTasks", {}, r"has no TextTask 'EchoTasks'; did you mean 'EchoTask'\?"),
        ("sample_tools:words", {}, "has no TextTask 'words'"),
        ("no_such_module:Task", {}, "module 'no_such_module' cannot be found"),
        (ECHO, {"limits": {"max_turn": 1}}, "Object contains unknown field `max_turn`"),
    ],
)
def test_a_task_is_made_from_plain_values_that_are_checked(
    env_id: str, kwargs: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        make_text_task(EnvSpec(id=env_id, kwargs=kwargs))


def test_a_wrapper_of_gymnasium_around_a_text_environment_is_refused() -> None:
    wrapper = WrapperSpec(path="gymnasium.wrappers:TimeLimit", kwargs={"max_episode_steps": 3})
    with pytest.raises(
        ConfigError, match="is a text environment, which takes no wrappers of gymnasium"
    ):
        make_text_task(EnvSpec(id=ECHO, wrappers=(wrapper,)))


def test_arguments_become_what_the_type_hints_say() -> None:
    task = make_text_task(EnvSpec(id=ECHO, kwargs={"limits": {"max_turns": 3}, "tags": ["a", "b"]}))
    assert task.limits.max_turns == 3
    assert task.tags == ("a", "b")  # type: ignore[attr-defined]


def test_a_name_belongs_to_one_task() -> None:
    assert {"text/arithmetic", "text/arithmetic_pair", "text/question", "text/search"} <= set(
        text_task_ids()
    )
    register_text_task("text/echo", ECHO)
    register_text_task("text/echo", ECHO)
    with pytest.raises(ValueError, match="'text/echo' is 'sample_tasks:EchoTask' already"):
        register_text_task("text/echo", "sample_tasks:MisbehavingTask")
    with pytest.raises(ValueError, match="expected an id without a colon"):
        register_text_task("text:echo", "nothing")


def test_an_episode_may_be_without_tools() -> None:
    assert TextLimits(max_tool_calls=0).max_tool_calls == 0


def test_an_id_and_the_path_of_its_class_give_the_same_class() -> None:
    for task_id in text_task_ids():
        found = find_text_task(task_id)
        assert find_text_task(f"{found.__module__}:{found.__name__}") is found


@pytest.mark.parametrize(
    ("task_id", "said"),
    [
        ("text/arithmetik", "is unknown; did you mean 'text/arithmetic'"),
        ("no_assets:Task", "module 'no_assets' cannot be found; is it on the path?"),
        (":Task", "':Task' is not the path of a TextTask, expected 'module:name'"),
        (
            "vla_rl.envs.text.task:TextTasc",
            r"has no TextTask 'TextTasc'; did you mean 'TextTask'\?",
        ),
        ("vla_rl.types:EnvSpec", "has no TextTask 'EnvSpec'"),
    ],
)
def test_what_is_no_text_environment_is_named_with_the_nearest(task_id: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_text_task(task_id)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"colour": "red"}, "argument of .* 'colour' is unknown"),
        ({"num_digits": "x"}, "'num_digits' of .* is 'x'"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_text_task(EnvSpec(id="text/arithmetic", kwargs=kwargs))


PAGE = Path(__file__).parents[3] / "docs" / "text_environments.md"
BLOCKS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in BLOCKS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(folder: Path, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_task_with_a_tool_has_no_more_than_thirty_lines_of_code_and_runs(folder: Path) -> None:
    code = [line for line in BLOCKS["rivers.py"].splitlines() if line.strip()]
    assert len(code) <= 30, len(code)
    lines = run(folder, "play_rivers.py")
    assert re.fullmatch(r"Which river flows through \w+\? \['look_up'\]", lines[0])
    assert lines[1] == "Mur"
    assert lines[2].split()[1] in ("True", "False")


def test_the_sandbox_answers_as_shown(folder: Path) -> None:
    assert run(folder, "sandboxed.py") == [
        "TypeError: math.factorial() takes exactly one argument (0 given)",
        "144",
        "timed_out - it took longer than 0.5 s and was stopped",
    ]


def test_what_is_missing_can_be_asked_as_shown(folder: Path) -> None:
    assert run(folder, "isolated.py") == ["left out by configuration"]


def test_a_data_set_becomes_starts(folder: Path) -> None:
    rows = [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(3)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    program = "from starts import starts\nprint([start.options for start in starts('train.jsonl')])"
    assert run(folder, "-c", program) == ["[{'row': 0}, {'row': 1}, {'row': 2}]"]


def test_every_environment_of_the_table_is_registered_and_takes_what_it_says() -> None:
    import inspect

    from vla_rl.envs.text.task import find_text_task

    rows = re.findall(r"^\| `(text/\w+)` \| .* \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == [
        "text/arithmetic",
        "text/arithmetic_pair",
        "text/openenv",
        "text/question",
        "text/search",
        "text/square",
        "text/sum",
    ]
    for name, arguments in rows:
        known = inspect.signature(find_text_task(name)).parameters
        assert set(re.findall(r"`(\w+)`", arguments)) <= set(known), name
