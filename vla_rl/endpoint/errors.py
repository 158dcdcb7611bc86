"""Errors in the clients' format: an HTTP status and a body.

The client's library turns the body into an exception.
"""

from typing import Any, Final

from vla_rl.util.foreign_data import repair_unicode

MOST_WORDS: Final = 600
"""Characters of an error's message; it may repeat what a client sent, whose begin and end are kept."""

_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class RequestError(Exception):
    """A request that is rejected.

    Args:
        message: what was wrong and what was expected.
        status: HTTP status.
        code: OpenAI's error code, if there is one.
        param: the field of the request that is wrong.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        self.message, self.status, self.code = _readable(message), status, code
        self.param = None if param is None else _readable(param)
        super().__init__(self.message)

    @property
    def kind(self) -> str:
        """OpenAI's `type` of the error."""
        return _TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )


def openai_error(error: RequestError) -> dict[str, Any]:
    """Return the body of an error in OpenAI's format."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """Return the body of an error in Anthropic's format."""
    kind = "api_error" if error.status >= 500 else error.kind
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _readable(text: str) -> str:
    """Return a text of at most `MOST_WORDS` characters that UTF-8 can hold."""
    if len(text) > MOST_WORDS:
        half = MOST_WORDS // 2 - 3
        text = f"{text[:half]} ... {text[-half:]}"
    return repair_unicode(text)
