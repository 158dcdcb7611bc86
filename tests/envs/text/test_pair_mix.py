"""What the base of a pair is taught: each role's own conversations, right without mistakes, and
half right with them.
"""

import itertools

from vla_rl.envs.text.tasks.arithmetic import calculate
from vla_rl.envs.text.tasks.arithmetic_conversations import draw_pair_conversation
from vla_rl.recipes.sft_text import SftTextConfig, make_conversation
from vla_rl.types import Message

SUMS = {"num_operators": 1, "num_digits": 2, "operators": "+-"}


def rounds_of(chat: tuple[Message, ...]) -> list[list[Message]]:
    """Cut where somebody asks."""
    places = [place for place, message in enumerate(chat) if message.role == "user"] + [len(chat)]
    return [list(chat[start:end]) for start, end in itertools.pairwise(places)]


def made(number: int, mistakes: float) -> tuple[Message, ...]:
    return draw_pair_conversation(number, **SUMS, mistakes=mistakes)  # type: ignore[arg-type]


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


def test_the_supervised_recipe_teaches_either_task_and_the_single_agents_by_default() -> None:
    alone = {make_conversation(SftTextConfig(), number)[0].content[-2:] for number in range(20)}
    assert alone == {"=?"}
    pair = SftTextConfig(task="arithmetic_pair", num_operators=1)
    asked = [make_conversation(pair, number)[0].content for number in range(40)]
    assert any(text.endswith("=?") for text in asked)
    assert any(not text.endswith("=?") for text in asked)
