"""Log-probs of sampled tokens in the clients' format.

They are the recorded ones, without the token that ends a reply.

They are those of the distribution that was sampled, after the run's temperature and under the
reply's grammar.
"""

from typing import Any

from vla_rl.types import Completion, TokenReport


def chat_log_probs(reply: Completion) -> dict[str, Any]:
    """Return the `logprobs` of a chat completion's choice."""
    return {"content": listed_log_probs(reply), "refusal": None}


def listed_log_probs(reply: Completion) -> list[dict[str, Any]]:
    """Return one entry for each token of the reply's text, with its calls."""
    return [
        {
            **_entry(token.text, log_prob),
            "top_logprobs": [_entry(text, other) for text, other in token.alternatives],
        }
        for token, log_prob in reported_tokens(reply)
    ]


def reported_tokens(reply: Completion) -> list[tuple[TokenReport, float]]:
    """Return the tokens of the text, with their log-probs; none if the policy reports none."""
    if reply.report is None:
        return []
    pairs = list(zip(reply.report, reply.log_probs.tolist(), strict=True))
    has_end_token = reply.finish_reason == "stop" and reply.stopped_by is None
    return pairs[:-1] if has_end_token else pairs


def _entry(text: bytes, log_prob: float) -> dict[str, Any]:
    return {"token": text.decode(errors="replace"), "logprob": log_prob, "bytes": list(text)}
