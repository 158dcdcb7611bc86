"""A model server as the engine sees it: requests, weights, health, and its loss.

    opened ─► its weights are loaded ─► ready ─► lost ─► opened again by the engine's care

A server is lost when it cannot be reached, answers with a status from 500 on, or misses a deadline.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from vla_rl.engines.remote.config import RemoteConfig
from vla_rl.engines.vllm.requests import Answer, ReplyRules
from vla_rl.errors import ActorDied, ConfigError
from vla_rl.types import Sampling

logger = logging.getLogger(__name__)

T = TypeVar("T")

HEALTH_S = 10.0
"""Seconds within which a server has to answer a check; it answers between two steps."""

MAX_REPLY_BYTES = 64 << 20
"""Largest answer that is read: some 100,000 tokens with twenty alternatives each."""


class ServerLost(ActorDied):
    """A model server cannot be reached, fails, or misses a deadline."""

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(url, 0, cause)
        self.args = (f"model server {url} is lost: {cause}",)


class ModelServer(ABC):
    """One server. Args: its address, the settings, and the engine's HTTP session.

    Attributes:
        url: its address, which names it in messages.
        num_running: number of requests without an answer yet.
        is_ready: whether it takes requests.
        weight_version: version of its weights; -1 before the first.
        loss: error of its last loss; None if it was never lost.
    """

    def __init__(self, url: str, config: RemoteConfig, session: aiohttp.ClientSession) -> None:
        self.url, self._config, self._session = url.rstrip("/"), config, session
        self.num_running, self.is_ready, self.weight_version = 0, False, -1
        self.loss: ServerLost | None = None

    @abstractmethod
    async def open(self) -> None:
        """Check that the server runs and has the interface. Raises: ServerLost; ConfigError."""

    @abstractmethod
    async def load(self, folder: Path, version: int) -> None:
        """Load weights from a checkpoint folder. Raises: ServerLost; ConfigError if it refuses them."""

    @abstractmethod
    async def _sample(
        self, tokens: Sequence[int], sampling: Sampling, max_tokens: int, rules: ReplyRules
    ) -> Answer:
        """Send one request."""

    @abstractmethod
    async def pause(self) -> None:
        """Have running requests answered with their tokens so far; take none until `resume`."""

    @abstractmethod
    async def resume(self) -> None:
        """Take requests again."""

    async def sample(
        self, tokens: Sequence[int], sampling: Sampling, max_tokens: int, rules: ReplyRules
    ) -> Answer:
        """Continue a prompt. Cancelling the call closes its connection, which aborts the request.

        Raises: ServerLost if the server is lost; ValueError for a request that it does not accept.
        """
        self.num_running += 1
        try:
            return await self._sample(tokens, sampling, max_tokens, rules)
        finally:
            self.num_running -= 1

    async def check(self) -> None:
        """Raise ServerLost if the server does not answer."""
        await self._send("GET", "/health", None, HEALTH_S)

    def note_loss(self, cause: str) -> ServerLost:
        """Take no requests to this server until it is opened again; return the error for callers."""
        error = ServerLost(self.url, cause)
        if self.is_ready:
            logger.warning("%s; its requests go to other servers", error)
        self.is_ready, self.loss = False, error
        return error

    async def _post(self, path: str, body: Any, kind: type[T], timeout_s: float) -> T:
        """Send JSON and decode the answer."""
        return self._decoded(path, await self._send("POST", path, body, timeout_s), kind)

    async def _get(self, path: str, kind: type[T]) -> T:
        return self._decoded(path, await self._send("GET", path, None, HEALTH_S), kind)

    async def _send(self, method: str, path: str, body: Any, timeout_s: float) -> bytes:
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} if data is not None else None
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method, self.url + path, data=data, headers=headers
                ) as response,
            ):
                content = await response.content.read(MAX_REPLY_BYTES + 1)
                while len(content) <= MAX_REPLY_BYTES and not response.content.at_eof():
                    content += await response.content.read(MAX_REPLY_BYTES + 1 - len(content))
        except TimeoutError as error:
            raise self.note_loss(f"{path} was not answered within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self.note_loss(f"{path}: {error or type(error).__name__}") from error
        if len(content) > MAX_REPLY_BYTES:
            raise ConfigError(
                f"{self.url}{path} answered with more than {MAX_REPLY_BYTES >> 20} MiB, which is no "
                "reply"
            )
        text = content[:500].decode(errors="replace")
        if response.status >= 500:
            raise self.note_loss(f"{path}: status {response.status}: {text}")
        if response.status in (401, 403):
            raise ConfigError(
                f"{self.url} refused our key (status {response.status}); expected the name of an "
                "environment variable with its key in engine.remote.key_variable"
            )
        if response.status == 404:
            raise ConfigError(self._missing(path))
        if response.status >= 400:
            raise ValueError(f"{self.url}{path} refused a request ({response.status}): {text}")
        return content

    def _decoded(self, path: str, content: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{self.url}{path} answered something else than api {self._config.api!r} does: "
                f"{error}; check engine.remote.api and engine.remote.urls"
            ) from error

    def _missing(self, path: str) -> str:
        """Return the error for a route that the server does not have."""
        return (
            f"{self.url} has no {path}; expected a server with the interface "
            f"{self._config.api!r}, as engine.remote.api says"
        )
