"""Requests and answers in vLLM's words."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from vla_rl.engines.vllm.adapter import (
    MultiModalFieldConfig,
    MultiModalKwargsItems,
    PlaceholderRange,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    mm_input,
    tokens_input,
)
from vla_rl.engines.vllm.greedy import TEMPERATURE
from vla_rl.engines.vllm.served import EngineLayout, EngineRequest
from vla_rl.types import Sampling

POOLING_TASK = "token_classify"
"""The task whose parameters carry ours to the model's pooler."""


class Answer(msgspec.Struct, frozen=True):
    """What was sampled for one request."""

    tokens: np.ndarray
    """int64 [T]."""

    log_probs: np.ndarray
    """float32 [T]."""

    versions: np.ndarray
    """int64 [T]."""

    finish_reason: str
    """`stop`, `length`, or `abort` where the engine gave it up."""

    @property
    def is_aborted(self) -> bool:
        """An update in the mode `restart` came between."""
        return self.finish_reason == "abort"

    @property
    def is_mixed(self) -> bool:
        """Its tokens are not all of one version."""
        return bool((self.versions != self.versions[:1]).any())


def engine_input(request: EngineRequest, modality: str | None, name: str) -> Any:
    """The prompt; `name` is unique to it, so that no feature is taken from a cache of another."""
    if not request.features:
        return tokens_input(request.token_ids)
    assert modality is not None
    fields = {key: MultiModalFieldConfig.batched(modality) for key in request.features}
    return mm_input(
        request.token_ids,
        MultiModalKwargsItems.from_hf_inputs(dict(request.features), fields),
        {modality: [name]},
        {modality: [PlaceholderRange(offset=request.feature_start, length=request.num_features)]},
    )


def engine_parameters(layout: EngineLayout, sampling: Sampling, max_tokens: int, stop_tokens: Sequence[int]) -> Any:
    """How a request is sampled."""
    if not sampling.temperature > 0.0:
        raise ValueError(f"Sampling.temperature is {sampling.temperature}, expected > 0; use greedy=True instead.")
    if layout.runner == "pooling":
        return PoolingParams(task=POOLING_TASK, extra_kwargs=msgspec.to_builtins(sampling))
    return SamplingParams(
        temperature=0.0 if sampling.greedy else sampling.temperature,
        extra_args={TEMPERATURE: sampling.temperature} if sampling.greedy else None,
        seed=sampling.seed,
        max_tokens=max_tokens,
        ignore_eos=True,
        stop_token_ids=list(stop_tokens),
        allowed_token_ids=None if layout.allowed_tokens is None else list(layout.allowed_tokens),
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def pooled_answer(output: Any, layout: EngineLayout) -> Answer:
    """Of a request to a pooling engine: rows of token index, log-prob and version."""
    data: Tensor | None = output.outputs.data
    assert layout.allowed_tokens is not None
    if data is None:
        return _aborted()
    index, log_probs, versions = data.float().numpy()
    tokens = np.asarray(layout.allowed_tokens, np.int64)[index.astype(np.int64)]
    return Answer(tokens, log_probs.copy(), versions.astype(np.int64), "length")


def generated_answer(output: Any) -> Answer:
    """Of a request to a generating engine."""
    completion = output.outputs[0]
    tokens = np.array(completion.token_ids, np.int64)
    log_probs = [row[token].logprob for row, token in zip(completion.logprobs or (), tokens.tolist(), strict=True)]
    versions = np.zeros(len(tokens), np.int64)
    for span in completion.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    return Answer(tokens, np.array(log_probs, np.float32), versions, completion.finish_reason)


def _aborted() -> Answer:
    return Answer(np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.int64), "abort")
