"""HTTP in which every error has a JSON body, those too that aiohttp finds before any handler runs.

A bad request line, a bad header, an unknown expectation: aiohttp answers them in plain text, which a
client of OpenAI's API cannot read.
"""

import logging
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from vla_rl.endpoint.errors import RequestError, openai_error

logger = logging.getLogger(__name__)


class JsonErrors(web.RequestHandler):
    """aiohttp's protocol of one connection, with JSON for errors."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer to what is no request; close the connection.

        Raises: ConnectionError if an answer has begun already.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun, so no error can be sent") from exc
        if status >= 500:
            logger.error("the endpoint could not answer %s", request.path, exc_info=exc)
        words = " ".join((message or HTTPStatus(status).phrase).split())
        response = json_error(RequestError(words, status=status))
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Log what a client did wrong for debugging only; it is in the answer."""
        logger.debug(*args, **kwargs)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; an error that is no JSON yet, such as an unknown `Expect`, becomes it."""
        if isinstance(resp, web.HTTPException):
            resp = json_error(RequestError(resp.text or resp.reason, status=resp.status))
            resp.force_close()
        return await super().finish_response(request, resp, start_time)


def json_error(error: RequestError) -> web.Response:
    """Return the answer for an error of a request whose API is not known."""
    return web.Response(
        body=msgspec.json.encode(openai_error(error)),
        status=error.status,
        content_type="application/json",
    )
