"""Requests and answers in vLLM's words."""

import math
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
    StructuredOutputsParams,
    mm_input,
    tokens_input,
)
from vla_rl.engines.vllm.greedy import TEMPERATURE
from vla_rl.engines.vllm.served import EngineLayout, EngineRequest
from vla_rl.types import Sampling

POOLING_TASK = "token_classify"
"""The task whose parameters carry ours to the model's pooler."""


class ReplyRules(msgspec.Struct, frozen=True):
    """What ends a reply, which tokens it may have, and what is reported with it."""

    stop_tokens: tuple[int, ...] = ()
    """Tokens that end it."""

    stop: tuple[str, ...] = ()
    """Texts that end it."""

    grammar: str | None = None
    """Grammar that sampling is restricted to."""

    num_alternatives: int = 0
    """Likeliest tokens reported beside each sampled one."""


NO_RULES = ReplyRules()
"""For policies over action chunks: a decision has a fixed number of tokens."""


class Answer(msgspec.Struct, frozen=True):
    """What was sampled for one request."""

    tokens: np.ndarray
    """int64 [T]."""

    log_probs: np.ndarray
    """float32 [T]."""

    versions: np.ndarray
    """int64 [T]."""

    finish_reason: str
    """`stop`, `length`, or `abort` if the engine gave it up."""

    stopped_by: str | None = None
    """The stop text that ended it."""

    alternatives: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each token the ids and log-probs of the likeliest ones, if they were asked for."""

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


def engine_parameters(layout: EngineLayout, sampling: Sampling, max_tokens: int, rules: ReplyRules) -> Any:
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
        stop_token_ids=list(rules.stop_tokens),
        stop=list(rules.stop),
        structured_outputs=None if rules.grammar is None else StructuredOutputsParams(grammar=rules.grammar),
        allowed_token_ids=None if layout.allowed_tokens is None else list(layout.allowed_tokens),
        logprobs=rules.num_alternatives,
        detokenize=bool(rules.stop),
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
    rows = completion.logprobs or ()
    log_probs = [row[token].logprob for row, token in zip(rows, tokens.tolist(), strict=True)]
    versions = np.zeros(len(tokens), np.int64)
    for span in completion.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    stop = completion.stop_reason
    return Answer(
        tokens,
        np.array(log_probs, np.float32),
        versions,
        completion.finish_reason,
        stopped_by=stop if isinstance(stop, str) else None,
        alternatives=tuple(_alternatives(row) for row in rows),
    )


def _alternatives(row: dict[int, Any]) -> tuple[tuple[int, float], ...]:
    """Ids and log-probs of the tokens that vLLM noted and that were possible, the likeliest first."""
    ranked = sorted((noted.rank, token, noted.logprob) for token, noted in row.items())
    return tuple((token, log_prob) for _, token, log_prob in ranked if log_prob > -math.inf)


def _aborted() -> Answer:
    return Answer(np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.int64), "abort")
