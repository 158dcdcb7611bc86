"""A policy in the form that vLLM engines serve: its methods, its requests, their answers.

    learner's network ─► tensors ─────────────► every weight once, under the names that the engine process loads
    observation ──► question ─► EngineRequest ──► ids and images
    tokens ◄──── act, generate ◄──── Answer

`vla_rl.models.vllm.serve` makes one from a policy; for your own family, write one class with the members
of `ServedActions` or `ServedLanguage`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.engines.chat_interface import ChatInterface, Question, Sampled
from vla_rl.engines.vllm import adapter
from vla_rl.types import Observation, Sampling


@dataclass(frozen=True)
class EngineFeature:
    """Content of adjacent placeholders of a prompt: an image of a conversation, or all that an
    observation shows.

    Attributes:
        start: position of the first placeholder.
        length: number of adjacent placeholders.
        values: tensors by the names that the model class reads, one for each feature.
        rows: tensors of several rows, such as patches; vLLM joins those of a batch end to end.
        is_part: bool [length], which placeholders become embeddings; None for all.
        digest: names the content; features of one digest are computed once. None: never shared.

    Example:
        EngineFeature(start=1, length=2, values={"images": frames})
    """

    start: int
    length: int
    values: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    is_part: Tensor | None = None
    digest: str | None = None


@dataclass(frozen=True)
class EngineRequest:
    """One request to an engine.

    Attributes:
        token_ids: the prompt, with all placeholders of features.
        features: what stands for the placeholders, in the order of the prompt.

    Example:
        EngineRequest([1, 0, 0, 318, 42], (EngineFeature(1, 2, {"images": frames}),))
        EngineRequest([1, 318, 42])
    """

    token_ids: list[int]
    features: tuple[EngineFeature, ...] = ()


@dataclass(frozen=True)
class EngineLayout:
    """Properties of a policy from which its engine is built.

    Attributes:
        config: content of `config.json` in the folder that the engine reads; the folder holds no
            weights.
        files: other small files of that folder.
        runner: `generate`, token after token, or `pooling`, everything in one pass.
        context_size: maximum tokens of a prompt and its answer, features included.
        num_tokens: number of tokens of a decision; None if the model itself ends its replies.
        allowed_tokens: ids that may be sampled; None allows all.
        reuses_prefixes: whether keys and values are reused for prompts that begin alike.
        features: vLLM's name for the kind of features, such as `image`; None for prompts of text
            only.
        max_features: largest number of features of a request.

    Example:
        OpenVLA-OFT, whose 56 tokens come from one pass:

        EngineLayout(config={"model_type": "vla_rl", ...}, runner="pooling", context_size=826, num_tokens=56,
                     allowed_tokens=range(31_744, 32_000), features="image")
    """

    config: Mapping[str, Any]
    runner: Literal["generate", "pooling"]
    context_size: int
    num_tokens: int | None
    files: Mapping[str, bytes] = field(default_factory=dict)
    allowed_tokens: Sequence[int] | None = None
    reuses_prefixes: bool = False
    features: str | None = None
    max_features: int = 1


class ServedPolicy(Protocol):
    """A policy in the form that vLLM engines serve.

    `tensors` runs on the device lane, the rest on the CPU in any thread.
    """

    @property
    def layout(self) -> EngineLayout:
        """Properties from which the engine is built."""
        ...

    @property
    def network(self) -> nn.Module:
        """The learner's weights, with which the engine starts."""
        ...

    def tensors(self, network: nn.Module) -> Mapping[str, Tensor]:
        """Return every weight that acts, adapters merged, under the names for the engine process.

        Views if possible.
        """
        ...

    def sample_request(self) -> EngineRequest:
        """Return a request that any weights can answer, for health checks."""
        ...


class ServedActions(ServedPolicy, Protocol):
    """A policy over action chunks."""

    def request(self, observation: Observation) -> EngineRequest:
        """Turn an observation into a request.

        Raises: ValueError for an observation that does not suit the policy.
        """
        ...

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Convert tokens int64 [T] to actions float32 [H, D]."""
        ...


class ServedLanguage(ServedPolicy, Protocol):
    """A policy over replies."""

    @property
    def chat(self) -> ChatInterface:
        """The policy's tokenizer and chat format."""
        ...

    def request(self, asked: Question) -> EngineRequest:
        """Turn a question into a request, with its images if it has some."""
        ...


GREEDY_TEMPERATURE: Final = "greedy_temperature"
"""Key of the `extra_args` of a greedy request, which this processor reads."""


POOLING_TASK = "token_classify"
"""The pooling task whose parameters carry ours to the model's pooler."""


class ReplyRules(msgspec.Struct, frozen=True):
    """Rules of a reply: what ends it, which tokens are allowed, and what is reported with it.

    Example:
        ReplyRules(stop_tokens=(2,), stop=("Observation:",), num_alternatives=5)
    """

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
    """The tokens sampled for one request.

    Example:
        Answer(tokens=np.array([1337, 2]), log_probs=np.array([-0.31, -0.02], np.float32),
               versions=np.array([7, 8]), finish_reason="stop")
    """

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
    """Return the prompt in vLLM's form: tokens and tensors as they are, so that vLLM neither
    tokenizes a text nor processes an image itself.

    A `name` of its own keeps vLLM from reusing another request's features that have no digest.
    """
    features = request.features
    if not features:
        return adapter.tokens_input(request.token_ids)
    assert modality is not None
    fields, tensors = {}, {}
    for key, value in features[0].values.items():
        # sizes and counts, which models read as numbers, stay on the host
        on_host = value.dtype == torch.int64
        fields[key] = adapter.MultiModalFieldConfig.batched(modality, keep_on_cpu=on_host)
        tensors[key] = torch.stack([each.values[key] for each in features])
    for key in features[0].rows:
        rows = [each.rows[key] for each in features]
        sizes = torch.tensor([len(each) for each in rows])
        fields[key] = adapter.MultiModalFieldConfig.flat_from_sizes(modality, sizes)
        tensors[key] = torch.cat(rows)
    return adapter.mm_input(
        request.token_ids,
        adapter.MultiModalKwargsItems.from_hf_inputs(tensors, fields),
        {modality: [each.digest or f"{name}-{each.start}" for each in features]},
        {
            modality: [
                adapter.PlaceholderRange(each.start, each.length, each.is_part) for each in features
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
        # The pooler samples inside of the engine: the logits of a chunk's 56 places would be 14,000
        # numbers a decision on their way back.
        return adapter.PoolingParams(task=POOLING_TASK, extra_kwargs=msgspec.to_builtins(sampling))
    sampling.require_no_mean()
    return adapter.SamplingParams(
        # vLLM takes 0 for greedy and then reports log-probs without a temperature; a processor of
        # ours divides the logits first, so that greedy log-probs are those of the learner.
        temperature=0.0 if sampling.greedy else sampling.temperature,
        extra_args={GREEDY_TEMPERATURE: sampling.temperature} if sampling.greedy else None,
        seed=sampling.seed,
        max_tokens=max_tokens,
        # What ends a reply is in the rules, and a chunk has a fixed number of tokens whichever
        # come.
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
    # Exact in float32: an index of the action tokens is below 2**24, and so is a number of updates.
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
    # With `keep` the weights change within a reply, and each token is learnt from as one of the
    # version that sampled it.
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


def make_reply_rules(asked: Question, stop_tokens: Iterable[int]) -> ReplyRules:
    """Return the rules of the reply to a question."""
    return ReplyRules(
        stop_tokens=tuple(sorted(stop_tokens)),
        stop=asked.options.stop,
        grammar=asked.grammar,
        num_alternatives=asked.options.top_log_probs or 0,
    )


def join_answers(parts: Sequence[Answer], rules: ReplyRules) -> Sampled:
    """Return a reply whose parts were sampled one after the other."""
    return Sampled(
        tokens=np.concatenate([part.tokens for part in parts]),
        log_probs=np.concatenate([part.log_probs for part in parts]),
        versions=np.concatenate([part.versions for part in parts]),
        finish_reason="stop" if parts[-1].finish_reason == "stop" else "length",
        stopped_by=parts[-1].stopped_by,
        # an engine reports the sampled token too where it is none of the likeliest
        alternatives=[row[: rules.num_alternatives] for part in parts for row in part.alternatives],
    )
