"""SGLang's server by its native interface: `/generate`, and weights loaded from disk.

As documented in SGLang's docs/advanced_features/sglang_for_rl.md and docs/basic_usage/native_api.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vla_rl.engines.remote.server import ModelServer
from vla_rl.engines.vllm.requests import Answer, ReplyRules
from vla_rl.errors import ConfigError
from vla_rl.types import Sampling

_Noted = tuple[float | None, int, str | None]
"""Log-prob, id and text of a token."""


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None


class _MetaInfo(msgspec.Struct):
    finish_reason: _Finish | None
    output_token_logprobs: list[_Noted] = []
    output_top_logprobs: list[list[_Noted] | None] | None = None


class _Generated(msgspec.Struct):
    meta_info: _MetaInfo


class _Loaded(msgspec.Struct):
    success: bool
    message: str = ""


class SglangServer(ModelServer):
    """A server that `sglang.launch_server` started."""

    async def open(self) -> None:
        """Check that it has SGLang's native interface. Raises: ServerLost; ConfigError."""
        await self._get("/get_model_info", dict[str, Any])

    async def load(self, folder: Path, version: int) -> None:
        """Load weights; the server flushes the keys and values of the old ones."""
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        timeout_s = self._config.update_timeout_s
        loaded = await self._post("/update_weights_from_disk", body, _Loaded, timeout_s)
        if not loaded.success:
            raise ConfigError(f"{self.url} could not load weights from {folder}: {loaded.message}")
        self.weight_version = version

    async def pause(self) -> None:
        """Have every running request answered with its tokens so far."""
        await self._send(
            "POST", "/pause_generation", {"mode": "abort"}, self._config.update_timeout_s
        )

    async def resume(self) -> None:
        """Take requests again."""
        await self._send("POST", "/continue_generation", {}, self._config.update_timeout_s)

    async def _sample(
        self, tokens: Sequence[int], sampling: Sampling, max_tokens: int, rules: ReplyRules
    ) -> Answer:
        if rules.grammar is not None:
            raise ValueError(
                "replies in a given form are not supported with engine.remote.api 'sglang', whose "
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
        told = (await self._post("/generate", body, _Generated, timeout_s)).meta_info
        finish = told.finish_reason or _Finish("abort")
        rows = told.output_top_logprobs or ()
        return Answer(
            tokens=np.array([token for _, token, _ in told.output_token_logprobs], np.int64),
            log_probs=np.array([each[0] for each in told.output_token_logprobs], np.float32),
            versions=np.full(len(told.output_token_logprobs), version, np.int64),
            finish_reason=finish.type,
            stopped_by=finish.matched if isinstance(finish.matched, str) else None,
            alternatives=tuple(
                tuple((token, value) for value, token, _ in row or () if value is not None)
                for row in rows
            ),
        )
