"""An error of a request has the form that each client's library understands."""

import pytest

from vla_rl.endpoint.http import RequestError, anthropic_error, openai_error


@pytest.mark.parametrize(
    ("status", "openai", "anthropic"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "authentication_error"),
        (404, "not_found_error", "not_found_error"),
        (413, "invalid_request_error", "invalid_request_error"),
        (429, "rate_limit_error", "rate_limit_error"),
        (500, "server_error", "api_error"),
        (503, "server_error", "api_error"),
    ],
)
def test_the_type_follows_from_the_status(status: int, openai: str, anthropic: str) -> None:
    error = RequestError("no", status=status)
    assert openai_error(error)["error"]["type"] == openai
    assert anthropic_error(error)["error"]["type"] == anthropic


def test_openai_gets_the_field_and_the_code_and_anthropic_does_not() -> None:
    error = RequestError("n is 2, expected 1", code="unsupported", param="n")
    assert openai_error(error) == {
        "error": {
            "message": "n is 2, expected 1",
            "type": "invalid_request_error",
            "param": "n",
            "code": "unsupported",
        }
    }
    assert anthropic_error(error) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "n is 2, expected 1"},
    }
