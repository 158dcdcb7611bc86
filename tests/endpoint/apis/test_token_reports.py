"""Log-probs of a reply are those of its text, in the clients' format."""

import numpy as np
import pytest

from vla_rl.endpoint.answers import get_reported_tokens, write_chat_log_probs, write_log_probs
from vla_rl.types import Completion, Message
from vla_rl.types.language import TokenReport


def reply(finish: str = "stop", **others) -> Completion:
    fields = {
        "message": Message(role="assistant", content="hé"),
        "prompt_tokens": np.arange(2),
        "tokens": np.arange(3),
        "log_probs": np.array([-0.5, -1.0, -0.25]),
        "weight_versions": np.zeros(3, np.int64),
        "finish_reason": finish,
        "report": (
            TokenReport(text=b"h", alternatives=((b"h", -0.5), (b"x", -2.0))),
            TokenReport(text="é".encode()),
            TokenReport(text=b"<end>"),
        ),
    } | others
    return Completion(**fields)


def test_the_token_that_ends_a_reply_is_not_listed() -> None:
    assert [token.text for token, _ in get_reported_tokens(reply())] == [b"h", "é".encode()]


@pytest.mark.parametrize("others", [{"finish": "length"}, {"stopped_by": "END"}])
def test_a_reply_that_ended_without_such_a_token_is_listed_whole(others: dict[str, str]) -> None:
    assert len(get_reported_tokens(reply(**others))) == 3


def test_each_entry_has_its_bytes_and_the_likeliest_others() -> None:
    first, second = write_log_probs(reply())
    assert first == {
        "token": "h",
        "logprob": -0.5,
        "bytes": [104],
        "top_logprobs": [
            {"token": "h", "logprob": -0.5, "bytes": [104]},
            {"token": "x", "logprob": -2.0, "bytes": [120]},
        ],
    }
    assert (second["token"], second["bytes"]) == ("é", [0xC3, 0xA9])


def test_a_token_that_ends_inside_a_character_keeps_its_bytes() -> None:
    report = (TokenReport(text=b"\xc3"),)
    half = reply("length", report=report, log_probs=np.array([-1.0]))
    (entry,) = write_log_probs(half)
    assert (entry["token"], entry["bytes"]) == ("\ufffd", [0xC3])


def test_a_policy_that_reports_nothing_has_an_empty_list() -> None:
    assert write_chat_log_probs(reply(report=None)) == {"content": [], "refusal": None}
