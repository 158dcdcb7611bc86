"""Methods that a vLLM engine needs from a policy family, besides the policy itself.

    learner's network ─► tensors ─────────────► every weight once, under the names that the engine process loads
    observation ──► question ─► EngineRequest ──► ids and pictures
    tokens ◄──────────── act, generate

`vla_rl.models.vllm.serve` makes one from a policy; for your own family, write one class with
these members.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor, nn

from vla_rl.engines.chat_interface import ChatInterface
from vla_rl.types import Observation


@dataclass(frozen=True)
class EngineRequest:
    """One request to an engine.

    Attributes:
        token_ids: the prompt, with a placeholder for each feature.
        features: tensors that become embeddings, by the names that the model class reads; images
            are uint8.
        feature_start: position of the first placeholder.
        num_features: number of adjacent placeholders; 0 without features.
    """

    token_ids: list[int]
    features: Mapping[str, Tensor] = field(default_factory=dict)
    feature_start: int = 0
    num_features: int = 0


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
    """

    config: Mapping[str, Any]
    runner: Literal["generate", "pooling"]
    context_size: int
    num_tokens: int | None
    files: Mapping[str, bytes] = field(default_factory=dict)
    allowed_tokens: Sequence[int] | None = None
    reuses_prefixes: bool = False
    features: str | None = None


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
