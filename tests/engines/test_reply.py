"""A reply grows token by token until something ends it."""

import numpy as np
import pytest

from vla_rl.engines.generator import Reply
from vla_rl.types import Sampling

PROMPT = np.array([5, 6], np.int64)
STOP = frozenset({9})


def reply(max_tokens: int = 3, **sampling) -> Reply:
    return Reply(PROMPT, Sampling(**sampling), max_tokens)


def test_a_reply_ends_at_a_stop_token_which_is_a_part_of_it() -> None:
    found = reply()
    found.add(7, -0.5, 1, STOP)
    assert not found.is_over
    found.add(9, -0.25, 2, STOP)
    assert (found.is_over, found.finish_reason) == (True, "stop")
    assert found.tokens.tolist() == [7, 9]
    assert (found.log_probs, found.versions) == ([-0.5, -0.25], [1, 2])
    assert found.conversation == [5, 6, 7, 9]


def test_a_reply_ends_at_its_limit() -> None:
    found = reply(max_tokens=2)
    for _ in range(2):
        assert found.finish_reason is None
        found.add(7, -0.5, 0, STOP)
    assert found.finish_reason == "length"


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    found = reply(max_tokens=1)
    found.add(9, -0.5, 0, STOP)
    assert found.finish_reason == "stop"


def test_the_model_reads_what_it_does_not_hold() -> None:
    found = reply()
    assert found.unread == [5, 6]
    found.num_held = 2
    found.add(7, -0.5, 0, STOP)
    assert found.unread == [7]


def test_draws_depend_on_the_seed_and_the_place_alone() -> None:
    def draws(max_tokens: int, seed: int) -> list[float]:
        found, drawn = reply(max_tokens, seed=seed), []
        for token in range(3):
            drawn.append(found.next_uniform)
            found.add(token, -1.0, 0, STOP)
        return drawn

    assert draws(3, seed=1) == draws(50, seed=1)
    assert draws(3, seed=1) != draws(3, seed=2)
    assert len(set(draws(3, seed=1))) == 3


class TooComplex:
    """A position in a grammar that cannot go on after some tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def take(self, token: int) -> None:
        self.num_tokens -= 1
        if self.num_tokens < 1:
            raise ValueError("a reply left its grammar: ParserTooComplex")


def test_a_grammar_that_grows_too_complex_ends_its_reply_with_the_tokens_so_far() -> None:
    found = Reply(PROMPT, Sampling(), 3, guide=TooComplex(2))  # type: ignore[arg-type]
    found.add(7, -1.0, 0, STOP)
    assert not found.is_over
    found.add(8, -1.0, 0, STOP)
    assert (found.finish_reason, found.failure, found.tokens.tolist()) == ("length", None, [7, 8])


def test_a_grammar_that_allows_no_token_is_a_failure() -> None:
    found = reply()
    found.end_early(ValueError("its grammar is too complex"))
    assert (found.is_over, found.finish_reason, str(found.failure)) == (
        True,
        None,
        "its grammar is too complex",
    )


def test_a_failure_ends_a_reply_too() -> None:
    found = reply()
    found.failure = ValueError("its grammar grew too complex")
    assert found.is_over


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_no_draw_has_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature is .*, expected > 0"):
        reply(temperature=temperature)
