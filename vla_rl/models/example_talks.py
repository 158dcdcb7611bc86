"""Conversations as long as a run's limits allow, for estimates: a language policy's rows before there
are any.

    context │ first prompt │ replies and all that is heard between them │      one conversation, one row
            └─ unless it is known how much is heard, the whole context is taken, and all of it scored
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from vla_rl.engines.config import EngineConfig
from vla_rl.errors import ConfigError
from vla_rl.learner.config import LearnerConfig
from vla_rl.learner.estimates.traced_pass import (
    Kept,
    TracedPass,
    kept_by_computation,
    trace_computation,
)
from vla_rl.models.language import CausalLanguageModel, VisionLanguageModel
from vla_rl.models.language.token_scores import LOGITS_AT_ONCE
from vla_rl.types import observed_conversation

ImageSize: TypeAlias = tuple[int, int]
"""Height and width in pixels."""

PASSING_BYTES: Final = 6
"""Bytes for each logit that the backward pass of the head makes and does not keep: a gradient in
float32, and one in half precision."""

RECOMPUTED_BYTES: Final = 16
"""Bytes for each logit of a chunk that are computed once more for it: four tensors in float32."""


@dataclass(frozen=True)
class Talks:
    """The longest conversations, and how many of them a micro-batch has."""

    prompt: int
    """Tokens before the first reply."""

    scored: int
    """Tokens after them."""

    replied: int
    """Those of them that the policy generates."""

    rows: int
    """Conversations of a micro-batch."""

    images: tuple[ImageSize, ...] = ()
    """Images of a conversation, among its first tokens."""

    @property
    def length(self) -> int:
        """Tokens of a conversation."""
        return self.prompt + self.scored


def longest_talks(
    model: CausalLanguageModel,
    engine: EngineConfig,
    learner: LearnerConfig,
    *,
    max_turns: int,
    max_reply: int | None = None,
    max_tokens: int | None = None,
    heard: int | None = None,
    images: Sequence[ImageSize] = (),
) -> Talks:
    """Return the longest conversations of a run.

    Args:
        model: the policy, whose context limits them.
        engine: further limits of a prompt and a reply.
        learner: limits of a micro-batch.
        max_turns: replies of a conversation.
        max_reply: tokens of a reply. None: the engine's limit.
        max_tokens: tokens of all replies. None: no limit.
        heard: most tokens of a conversation that are not replies; None if that is not known.
        images: images that a conversation shows.

    Raises: ConfigError if the images alone fill the context.
    """
    context = min(model.context_size, engine.max_context or model.context_size)
    reply = min(max_reply or engine.max_reply, engine.max_reply)
    replied = min(max_turns * reply, max_tokens or context, context - 1)
    length = context if heard is None else min(context, heard + replied)
    num_image_tokens = sum(image_tokens(model, images))
    if num_image_tokens + 1 > length:
        raise ConfigError(
            f"the images of a conversation have {num_image_tokens} tokens, expected fewer than its "
            f"{length}; show fewer or smaller ones, or raise engine.max_context"
        )
    # between turns something is heard, which is scored too and masked
    prompt = length - replied if max_turns == 1 else 1
    rows = learner.micro_batch
    if learner.micro_batch_tokens is not None:
        rows = min(rows, max(1, learner.micro_batch_tokens // length))
    return Talks(prompt, length - prompt, replied, rows, tuple(images))


def shortest_talks(model: CausalLanguageModel, images: Sequence[ImageSize], rows: int) -> Talks:
    """Return conversations that show images, and have one more token before a reply of one."""
    prompt = sum(image_tokens(model, images)) + 1
    return Talks(prompt, scored=1, replied=1, rows=rows, images=tuple(images))


def trace_talks(model: CausalLanguageModel, talks: Talks) -> TracedPass:
    """Trace the passes of a micro-batch: arithmetic of one conversation, memory of all of them."""
    batch = prepared_talks(model, talks)
    found = trace_computation(model.network, model.blocks, lambda: score_talks(model, talks, batch))
    return found.of_rows(talks.rows, head=_head_bytes(model, talks))


def trace_kept_talks(model: CausalLanguageModel, talks: Talks) -> Kept:
    """Trace the memory of a micro-batch alone, in half of the time of `trace_talks`."""
    batch = prepared_talks(model, talks)
    kept = kept_by_computation(
        model.network, model.blocks, lambda: score_talks(model, talks, batch)
    )
    return replace(kept, head=_head_bytes(model, talks))


def _head_bytes(model: CausalLanguageModel, talks: Talks) -> int:
    """Return the bytes that the backward pass of the network's head needs."""
    config: Any = model.network.config
    vocabulary = int(config.get_text_config().vocab_size)
    positions = talks.rows * talks.scored
    chunk = max(1, LOGITS_AT_ONCE // vocabulary)
    # without chunks, what is computed once more is among the activations
    each = PASSING_BYTES + (RECOMPUTED_BYTES if positions > chunk else 0)
    return each * min(positions, chunk) * vocabulary


def prepared_talks(model: CausalLanguageModel, talks: Talks) -> Any:
    """Prepare the prompts of a micro-batch, and the images of its conversations, which are black."""
    tokens = np.zeros(talks.prompt, np.int64)
    images = [np.zeros((*size, 3), np.uint8) for size in talks.images]
    lengths = image_tokens(model, talks.images)
    starts = (np.cumsum(lengths) - lengths).tolist() if lengths else []
    return model.prepare([observed_conversation(tokens, images, starts)] * talks.rows)


def score_talks(model: CausalLanguageModel, talks: Talks, batch: Any) -> tuple[Tensor, Tensor]:
    """Score a micro-batch of conversations of one token, prepared before."""
    tokens = torch.zeros(talks.rows, talks.scored, dtype=torch.long)
    ends = [talks.scored] * talks.rows
    return model.score(batch, tokens, ends, torch.ones(talks.rows))


def image_tokens(model: CausalLanguageModel, images: Sequence[ImageSize]) -> list[int]:
    """Return the number of tokens of each image.

    Raises: ConfigError if the policy reads none.
    """
    if images and not isinstance(model, VisionLanguageModel):
        raise ConfigError(
            f"the conversations show images, but {type(model).__name__} reads text alone; take a "
            "policy with a vision tower, such as Qwen2.5-VL"
        )
    return [model.num_image_tokens(*size) for size in images]  # type: ignore[attr-defined]
