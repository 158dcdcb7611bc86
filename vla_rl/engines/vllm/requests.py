"""Conversion of requests and answers to and from vLLM's types."""

import math
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from vla_rl.engines.vllm import adapter
from vla_rl.engines.vllm.layout import GREEDY_TEMPERATURE
from vla_rl.engines.vllm.served import EngineLayout, EngineRequest
from vla_rl.types import Sampling

POOLING_TASK = "token_classify"
"""The pooling task whose parameters carry ours to the model's pooler."""


class ReplyRules(msgspec.Struct, frozen=True):
    """Rules of a reply: what ends it, which tokens are allowed, and what is reported with it."""

    stop_tokens: tuple[int, ...] = ()
    """Tokens that end the reply."""

    stop: tuple[str, ...] = ()
    """Texts that end the reply."""

    grammar: str | None = None
    """Grammar that sampling is restricted to."""

    num_alternatives: int = 0
    """Number of likeliest tokens reported beside each sampled one."""


NO_RULES = ReplyRules()
"""Rules for policies over action chunks, whose decisions have a fixed number of tokens."""


class Answer(msgspec.Struct, frozen=True):
    """The tokens sampled for one request."""

    tokens: np.ndarray
    """Sampled tokens, int64 [T]."""

    log_probs: np.ndarray
    """Log-prob of each token, float32 [T]."""

    versions: np.ndarray
    """Weight version of each token, int64 [T]."""

    finish_reason: str
    """`stop`, `length`, or `abort` if the engine aborted it."""

    stopped_by: str | None = None
    """The stop text that ended the reply, if one did."""

    alternatives: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Ids and log-probs of the likeliest tokens at each place, if they were requested."""

    @property
    def is_aborted(self) -> bool:
        """Whether a weight update in the mode `restart` aborted the request."""
        return self.finish_reason == "abort"

    @property
    def is_mixed(self) -> bool:
        """Whether its tokens have different weight versions."""
        return bool((self.versions != self.versions[:1]).any())


def engine_input(request: EngineRequest, modality: str | None, name: str) -> Any:
    """Return the prompt in vLLM's form.

    A `name` of its own keeps vLLM from reusing another request's cached features.
    """
    if not request.features:
        return adapter.tokens_input(request.token_ids)
    assert modality is not None
    fields = {key: adapter.MultiModalFieldConfig.batched(modality) for key in request.features}
    return adapter.mm_input(
        request.token_ids,
        adapter.MultiModalKwargsItems.from_hf_inputs(dict(request.features), fields),
        {modality: [name]},
        {
            modality: [
                adapter.PlaceholderRange(offset=request.feature_start, length=request.num_features)
            ]
        },
    )


def engine_parameters(
    layout: EngineLayout, sampling: Sampling, max_tokens: int, rules: ReplyRules
) -> Any:
    """Return vLLM's sampling or pooling parameters of a request."""
    if not sampling.temperature > 0.0:
        raise ValueError(
            f"Sampling.temperature is {sampling.temperature}, expected > 0; use "
            "greedy=True instead."
        )
    if layout.runner == "pooling":
        return adapter.PoolingParams(task=POOLING_TASK, extra_kwargs=msgspec.to_builtins(sampling))
    sampling.require_no_mean()
    return adapter.SamplingParams(
        temperature=0.0 if sampling.greedy else sampling.temperature,
        extra_args={GREEDY_TEMPERATURE: sampling.temperature} if sampling.greedy else None,
        seed=sampling.seed,
        max_tokens=max_tokens,
        ignore_eos=True,
        stop_token_ids=list(rules.stop_tokens),
        stop=list(rules.stop),
        structured_outputs=None
        if rules.grammar is None
        else adapter.StructuredOutputsParams(grammar=rules.grammar),
        allowed_token_ids=None if layout.allowed_tokens is None else list(layout.allowed_tokens),
        logprobs=rules.num_alternatives,
        detokenize=bool(rules.stop),
        output_kind=adapter.RequestOutputKind.FINAL_ONLY,
    )


def pooled_answer(output: Any, layout: EngineLayout) -> Answer:
    """Read the answer of a pooling engine: rows of token index, log-prob and version."""
    data: Tensor | None = output.outputs.data
    assert layout.allowed_tokens is not None
    if data is None:
        return _aborted()
    index, log_probs, versions = data.float().numpy()
    tokens = np.asarray(layout.allowed_tokens, np.int64)[index.astype(np.int64)]
    return Answer(tokens, log_probs.copy(), versions.astype(np.int64), "length")


def generated_answer(output: Any) -> Answer:
    """Read the answer of a generating engine."""
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
    """Return ids and log-probs of the possible tokens that vLLM reported, the likeliest first."""
    ranked = sorted((noted.rank, token, noted.logprob) for token, noted in row.items())
    return tuple((token, log_prob) for _, token, log_prob in ranked if log_prob > -math.inf)


def _aborted() -> Answer:
    return Answer(np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.int64), "abort")
