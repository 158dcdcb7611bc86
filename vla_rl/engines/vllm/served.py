"""What a vLLM engine needs of a policy family, besides the policy itself.

    learner's network ─► tensors ─────────────► wire: every weight once, by the names that the engine process loads
    observation ──► question ─► EngineRequest ──► ids and pictures
    tokens ◄──────────── act, generate

`vla_rl.models.serving.serve` makes one from a policy; a family of your own writes one class with these members.
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
    """One question to an engine.

    Attributes:
        token_ids: the prompt, with a placeholder wherever a feature goes.
        features: tensors that become embeddings, by the names that the model class reads; images are uint8.
        feature_start: position of the first placeholder.
        num_features: placeholders in a row; 0 where there are no features.
    """

    token_ids: list[int]
    features: Mapping[str, Tensor] = field(default_factory=dict)
    feature_start: int = 0
    num_features: int = 0


@dataclass(frozen=True)
class EngineLayout:
    """How an engine is built for a policy.

    Attributes:
        config: `config.json` of the folder that the engine reads; it holds no weights.
        files: other small files of that folder.
        runner: `generate`, token after token, or `pooling`, everything in one pass.
        context_size: most tokens of a prompt and its answer, features included.
        num_tokens: tokens of a decision; None where the model says itself when it is done.
        allowed_tokens: ids that may be sampled; None for all.
        reuses_prefixes: keep keys and values of prompts that begin alike.
        features: vLLM's name of what the features are, such as `image`; None where a prompt is text alone.
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
    """A policy as vLLM serves it. `tensors` runs on the device lane, the rest on the CPU in any thread."""

    @property
    def layout(self) -> EngineLayout:
        """How the engine is built."""
        ...

    @property
    def network(self) -> nn.Module:
        """The learner's weights, which the engine begins with."""
        ...

    def tensors(self, network: nn.Module) -> Mapping[str, Tensor]:
        """Every weight that acts, adapters merged, by the names of the wire; views where that is possible."""
        ...

    def sample_request(self) -> EngineRequest:
        """A question that any weights can answer: for health."""
        ...


class ServedActions(ServedPolicy, Protocol):
    """A policy over action chunks."""

    def request(self, observation: Observation) -> EngineRequest:
        """An observation as a question. Raises: ValueError where it is not what the policy expects."""
        ...

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens int64 [T] to actions float32 [H, D]."""
        ...


class ServedLanguage(ServedPolicy, Protocol):
    """A policy over replies."""

    @property
    def chat(self) -> ChatInterface:
        """Its tokenizer and chat format."""
        ...
