"""vLLM's own HTTP server: `/v1/completions` with token ids, and its development routes for weights.

Read in vLLM 0.32: entrypoints/openai/completion/protocol.py, entrypoints/serve/dev.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vla_rl.engines.remote.server import ModelServer
from vla_rl.engines.vllm.requests import Answer, ReplyRules
from vla_rl.errors import ConfigError
from vla_rl.types import Sampling

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

    async def open(self) -> None:
        """Find the name of the served model. Raises: ServerLost; ConfigError."""
        names = [model.id for model in (await self._get("/v1/models", _Models)).data]
        self._model = self._config.model or next(iter(names), "")
        if self._model not in names:
            raise ConfigError(
                f"{self.url} serves {', '.join(names) or 'no model'}, expected "
                f"{self._config.model or 'one'} (engine.remote.model)"
            )

    async def load(self, folder: Path, version: int) -> None:
        """Load weights, and forget the keys and values of the old ones."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._post(RELOAD, body, dict[str, Any], self._config.update_timeout_s)
        await self._send("POST", "/reset_prefix_cache", {}, self._config.update_timeout_s)
        self.weight_version = version

    async def pause(self) -> None:
        """Let running requests end, as `RemoteConfig` requires: this server has no route for more."""

    async def resume(self) -> None:
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
            "ignore_eos": True,
            "stop_token_ids": list(rules.stop_tokens),
            "stop": list(rules.stop),
            "logprobs": rules.num_alternatives,
            "return_token_ids": True,
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
