"""Conversations that the small base is taught: right without mistakes, and what follows one is what
the calculator says.
"""

import itertools
from collections.abc import Sequence

from vla_rl.envs.text.tasks.arithmetic import calculate
from vla_rl.envs.text.tasks.arithmetic_conversations import TOOLS, UNREADABLE, draw_conversation
from vla_rl.types import Message

SUMS = {"num_operators": 2, "num_digits": 1, "operators": "+-"}


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
    chats = [draw_conversation(seed, **SUMS, mistakes=0.0) for seed in range(50)]  # type: ignore[arg-type]
    assert all(solves(chat) for chat in chats)
    assert {tuple(message.role for message in chat) for chat in chats} == {
        ("user", "assistant", "tool", "assistant", "tool", "assistant")
    }


def test_with_mistakes_some_are_solved_and_the_calculator_still_tells_the_truth() -> None:
    chats = [draw_conversation(seed, **SUMS, mistakes=0.35) for seed in range(400)]  # type: ignore[arg-type]
    assert 0.25 < sum(map(solves, chats)) / len(chats) < 0.55
    for chat in chats:
        for call, answer in itertools.pairwise(chat):
            if answer.role == "tool":
                value = calculate(operation_of(call))
                assert answer.content == (UNREADABLE if value is None else str(value))


def test_a_conversation_ends_however_many_mistakes_are_made() -> None:
    chats = [draw_conversation(seed, **SUMS, mistakes=0.95) for seed in range(3000)]  # type: ignore[arg-type]
    assert max(len(chat) for chat in chats) <= 16
    assert all(chat[-1].content for chat in chats)


def test_the_same_seed_gives_the_same_conversation() -> None:
    first, second = (draw_conversation(7, **SUMS, mistakes=0.5) for _ in range(2))  # type: ignore[arg-type]
    assert first == second


def test_the_tool_is_the_environments_own() -> None:
    (tool,) = TOOLS
    assert tool.name == "calc"
    assert tool.parameters["required"] == ["e"]
