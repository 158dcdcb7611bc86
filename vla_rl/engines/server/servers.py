"""A model server as the engine sees it: requests, weights, health, its loss.

    opened ─► its weights are loaded ─► ready ─► lost ─► opened again by the pool's checks

A server is lost when it cannot be reached, answers with a status from 500 on, or misses a deadline.

`VllmServer` is vLLM's own HTTP server: `/v1/completions` with token ids, and its development routes for
weights; read in vLLM 0.32: entrypoints/openai/completion/protocol.py, entrypoints/serve/dev.
`SglangServer` is SGLang's server by its native interface: `/generate`, and weights loaded from disk; as
documented in SGLang's docs/advanced_features/sglang_for_rl.md and docs/basic_usage/native_api.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import numpy as np

from vla_rl.engines.config import ModelServerConfig
from vla_rl.engines.vllm.served import Answer, ReplyRules
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

    def __init__(self, url: str, config: ModelServerConfig, session: aiohttp.ClientSession) -> None:
        self.url, self._config, self._session = url.rstrip("/"), config, session
        self.num_running, self.is_ready, self.weight_version = 0, False, -1
        self.loss: ServerLost | None = None

    @abstractmethod
    async def check_interface(self) -> None:
        """Check that the server runs and has the interface. Raises: ServerLost; ConfigError."""

    @abstractmethod
    async def load_weights(self, folder: Path, version: int) -> None:
        """Load weights from a checkpoint folder. Raises: ServerLost; ConfigError if it refuses them."""

    @abstractmethod
    async def _sample(
        self, tokens: Sequence[int], sampling: Sampling, max_tokens: int, rules: ReplyRules
    ) -> Answer:
        """Send one request."""

    @abstractmethod
    async def pause_requests(self) -> None:
        """Have running requests answered with their tokens so far; take none until `resume_requests`."""

    @abstractmethod
    async def resume_requests(self) -> None:
        """Take requests again."""

    async def sample_reply(
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

    async def check_health(self) -> None:
        """Raise ServerLost if the server does not answer."""
        await self._send("GET", "/health", None, HEALTH_S)

    def mark_lost(self, cause: str) -> ServerLost:
        """Take no requests to this server until it is opened again; return the error for callers."""
        error = ServerLost(self.url, cause)
        if self.is_ready:
            logger.warning("%s; its requests go to other servers", error)
        # Lost at the first sign: its requests go on at another server at once, and if it was only
        # slow, the next check brings it back.
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
                # Read up to a limit: what answers there may be no model server, and an endless page
                # would fill the memory of the run.
                content = await response.content.read(MAX_REPLY_BYTES + 1)
                while len(content) <= MAX_REPLY_BYTES and not response.content.at_eof():
                    content += await response.content.read(MAX_REPLY_BYTES + 1 - len(content))
        except TimeoutError as error:
            raise self.mark_lost(f"{path} was not answered within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self.mark_lost(f"{path}: {error or type(error).__name__}") from error
        if len(content) > MAX_REPLY_BYTES:
            raise ConfigError(
                f"{self.url}{path} answered with more than {MAX_REPLY_BYTES >> 20} MiB, which is no "
                "reply"
            )
        text = content[:500].decode(errors="replace")
        if response.status >= 500:
            raise self.mark_lost(f"{path}: status {response.status}: {text}")
        # A key that is missing is an error of the configuration, which no other server and no retry
        # repairs.
        if response.status in (401, 403):
            raise ConfigError(
                f"{self.url} refused our key (status {response.status}); expected the name of an "
                "environment variable with its key in engine.server.key_variable"
            )
        # vLLM's server has the routes for weights only in its development mode, so a route that is
        # missing is named with that remedy.
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
                f"{error}; check engine.server.api and engine.server.urls"
            ) from error

    def _missing(self, path: str) -> str:
        """Return the error for a route that the server does not have."""
        return (
            f"{self.url} has no {path}; expected a server with the interface "
            f"{self._config.api!r}, as engine.server.api says"
        )


RELOAD = "/collective_rpc"
TOKEN_ID = "token_id:"
"""Prefix of a token in an answer whose tokens are written as ids."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _LogProbs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _LogProbs
    finish_reason: str
    stop_reason: int | str | None = None


class _Completions(msgspec.Struct):
    choices: list[_Choice]


class VllmServer(ModelServer):
    """A server that `vllm serve` started."""

    async def check_interface(self) -> None:
        """Find the name of the served model. Raises: ServerLost; ConfigError."""
        names = [model.id for model in (await self._get("/v1/models", _Models)).data]
        self._model = self._config.model or next(iter(names), "")
        if self._model not in names:
            raise ConfigError(
                f"{self.url} serves {', '.join(names) or 'no model'}, expected "
                f"{self._config.model or 'one'} (engine.server.model)"
            )

    async def load_weights(self, folder: Path, version: int) -> None:
        """Load weights, and forget the keys and values of the old ones."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._post(RELOAD, body, dict[str, Any], self._config.update_timeout_s)
        # Keys and values that it kept are of the old weights, and would be reused for prompts that
        # begin alike.
        await self._send("POST", "/reset_prefix_cache", {}, self._config.update_timeout_s)
        self.weight_version = version

    async def pause_requests(self) -> None:
        """Let running requests end, as `ModelServerConfig` requires: this server has no route for more."""

    async def resume_requests(self) -> None:
        """Do nothing: it was not paused."""

    async def _sample(
        self, tokens: Sequence[int], sampling: Sampling, max_tokens: int, rules: ReplyRules
    ) -> Answer:
        version = self.weight_version
        body = {
            "model": self._model,
            "prompt": list(tokens),
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "seed": sampling.seed,
            "max_tokens": max_tokens,
            # The tokens that end a reply are the policy's own, which may differ from the
            # checkpoint's: they are in `stop_token_ids`.
            "ignore_eos": True,
            "stop_token_ids": list(rules.stop_tokens),
            "stop": list(rules.stop),
            "logprobs": rules.num_alternatives,
            "return_token_ids": True,
            # Texts of tokens are ambiguous: the learner needs the ids that were sampled.
            "return_tokens_as_token_ids": True,
            # without it the server would add its model's own sampling settings, such as top_k
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        if rules.grammar is not None:
            body["structured_outputs"] = {"grammar": rules.grammar}
        timeout_s = self._config.request_timeout_s
        (choice,) = (await self._post("/v1/completions", body, _Completions, timeout_s)).choices
        return Answer(
            tokens=np.array(choice.token_ids, np.int64),
            log_probs=np.array(choice.logprobs.token_logprobs, np.float32),
            versions=np.full(len(choice.token_ids), version, np.int64),
            finish_reason=choice.finish_reason,
            stopped_by=choice.stop_reason if isinstance(choice.stop_reason, str) else None,
            alternatives=tuple(_ranked(row or {}) for row in choice.logprobs.top_logprobs or ()),
        )

    def _missing(self, path: str) -> str:
        if path != RELOAD:
            return super()._missing(path)
        return (
            f"{self.url} has no {path}, through which it loads new weights; start vLLM's server with "
            "VLLM_SERVER_DEV_MODE=1, on a network of your own"
        )


def _ranked(row: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Return ids and log-probs, the likeliest first."""
    found = [(int(name.removeprefix(TOKEN_ID)), log_prob) for name, log_prob in row.items()]
    return tuple(sorted(found, key=lambda each: -each[1]))


_ReportedToken = tuple[float | None, int, str | None]
"""Log-prob, id and text of a token."""


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None


class _MetaInfo(msgspec.Struct):
    finish_reason: _Finish | None
    output_token_logprobs: list[_ReportedToken] = []
    output_top_logprobs: list[list[_ReportedToken] | None] | None = None


class _Generated(msgspec.Struct):
    meta_info: _MetaInfo


class _Loaded(msgspec.Struct):
    success: bool
    message: str = ""


class SglangServer(ModelServer):
    """A server that `sglang.launch_server` started."""

    async def check_interface(self) -> None:
        """Check that it has SGLang's native interface. Raises: ServerLost; ConfigError."""
        await self._get("/get_model_info", dict[str, Any])

    async def load_weights(self, folder: Path, version: int) -> None:
        """Load weights; the server flushes the keys and values of the old ones."""
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        timeout_s = self._config.update_timeout_s
        loaded = await self._post("/update_weights_from_disk", body, _Loaded, timeout_s)
        if not loaded.success:
            raise ConfigError(f"{self.url} could not load weights from {folder}: {loaded.message}")
        self.weight_version = version

    async def pause_requests(self) -> None:
        """Have every running request answered with its tokens so far."""
        await self._send(
            "POST", "/pause_generation", {"mode": "abort"}, self._config.update_timeout_s
        )

    async def resume_requests(self) -> None:
        """Take requests again."""
        await self._send("POST", "/continue_generation", {}, self._config.update_timeout_s)

    async def _sample(
        self, tokens: Sequence[int], sampling: Sampling, max_tokens: int, rules: ReplyRules
    ) -> Answer:
        if rules.grammar is not None:
            raise ValueError(
                "replies in a given form are not supported with engine.server.api 'sglang', whose "
                "grammars differ from ours; take a vLLM server or engine 'torch'"
            )
        version = self.weight_version
        body = {
            "input_ids": list(tokens),
            "sampling_params": {
                "temperature": 0.0 if sampling.greedy else sampling.temperature,
                "sampling_seed": sampling.seed,
                "max_new_tokens": max_tokens,
                "stop_token_ids": list(rules.stop_tokens),
                "stop": list(rules.stop),
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
            },
            "return_logprob": True,
            "top_logprobs_num": rules.num_alternatives,
        }
        timeout_s = self._config.request_timeout_s
        reply = (await self._post("/generate", body, _Generated, timeout_s)).meta_info
        finish = reply.finish_reason or _Finish("abort")
        rows = reply.output_top_logprobs or ()
        return Answer(
            tokens=np.array([token for _, token, _ in reply.output_token_logprobs], np.int64),
            log_probs=np.array([each[0] for each in reply.output_token_logprobs], np.float32),
            versions=np.full(len(reply.output_token_logprobs), version, np.int64),
            finish_reason=finish.type,
            stopped_by=finish.matched if isinstance(finish.matched, str) else None,
            alternatives=tuple(
                tuple((token, value) for value, token, _ in row or () if value is not None)
                for row in rows
            ),
        )
