"""Inputs that a policy can read, made from its configuration alone: for estimates, before there is
an environment.

A policy of actions gets one observation. A language policy gets conversations as long as the run's
limits allow:

    context │ first prompt │ replies and all that is observed between them │      one conversation, one row
            └─ unless it is known how much is observed, the whole context is taken, and all of it scored
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

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
from vla_rl.models.mlp import MlpConfig
from vla_rl.models.prismatic.config import PrismaticConfig
from vla_rl.types import Observation, make_conversation_observation

if TYPE_CHECKING:  # takes seconds to import, and policies of actions do without
    from vla_rl.models.language import CausalLanguageModel

INSTRUCTION: Final = "pick up the black bowl between the plate and the ramekin and place it on it"
"""An instruction as long as LIBERO's longer ones."""


class ExampleRow(NamedTuple):
    """A prepared batch of one row, and tokens that could be its action."""

    batch: Any
    tokens: Tensor
    """int64 [1, T]."""


def example_row(model: Any) -> ExampleRow | None:
    """Return a row of `model`; None for language policies (`longest_conversations`), and for families that
    are not ours.
    """
    observation = example_observation(model)
    if observation is None:
        return None
    batch, own = model.prepare([observation]), getattr(model, "example_tokens", None)
    if own is not None:
        return ExampleRow(batch, own())
    config = model.config
    # An estimate needs tokens of the right shape; what they mean does not matter.
    idle = np.zeros((1, config.chunk_size, config.action_dim), np.float32)
    return ExampleRow(batch, torch.from_numpy(model.encode(idle)))


def example_observation(model: Any, seed: int = 0) -> Observation | None:
    """Return images of noise and a state in the middle of its range, or what the family itself makes;
    None as in `example_row`.
    """
    own = getattr(model, "example_observation", None)
    if own is not None:
        observation: Observation = own(seed)
        return observation
    config = getattr(model, "config", None)
    if isinstance(config, MlpConfig):
        return {"state": np.zeros(config.state_size, np.float32)}
    if not isinstance(config, PrismaticConfig):
        return None
    size = (config.image_size, config.image_size, 3)
    random = np.random.default_rng(seed)
    fields: dict[str, Any] = {
        camera: random.integers(0, 256, size, dtype=np.uint8) for camera in config.cameras
    }
    proprio = getattr(config, "proprio", None)
    if proprio is not None:
        middle = (np.array(proprio.low) + np.array(proprio.high)) / 2
        fields[proprio.key] = middle.astype(np.float32)
    return {**fields, "instruction": INSTRUCTION}


ImageSize: TypeAlias = tuple[int, int]
"""Height and width in pixels."""

GRADIENT_BYTES: Final = 6
"""Bytes for each logit that the backward pass of the head makes and does not keep: a gradient in
float32, and one in half precision."""

RECOMPUTED_BYTES: Final = 16
"""Bytes for each logit of a chunk that are computed once more for it: four tensors in float32."""


@dataclass(frozen=True)
class ConversationSizes:
    """The longest conversations, and how many of them a micro-batch has.

    Example:
        ConversationSizes(prompt=1, scored=2047, completion_tokens=192, rows=4)
    """

    prompt: int
    """Tokens before the first reply."""

    scored: int
    """Tokens after them."""

    completion_tokens: int
    """Those of them that the policy generates."""

    rows: int
    """Conversations of a micro-batch."""

    images: tuple[ImageSize, ...] = ()
    """Images of a conversation, among its first tokens."""

    @property
    def length(self) -> int:
        """Tokens of a conversation."""
        return self.prompt + self.scored


def longest_conversations(
    model: "CausalLanguageModel",
    engine: EngineConfig,
    learner: LearnerConfig,
    *,
    max_turns: int,
    max_reply: int | None = None,
    max_tokens: int | None = None,
    observation_tokens: int | None = None,
    images: Sequence[ImageSize] = (),
) -> ConversationSizes:
    """Return the longest conversations of a run.

    Args:
        model: the policy, whose context limits them.
        engine: further limits of a prompt and a reply.
        learner: limits of a micro-batch.
        max_turns: replies of a conversation.
        max_reply: tokens of a reply. None: the engine's limit.
        max_tokens: tokens of all replies. None: no limit.
        observation_tokens: most tokens of a conversation that are not replies; None if that is not known.
        images: images that a conversation shows.

    Raises: ConfigError if the images alone fill the context.
    """
    context = min(model.context_size, engine.max_context or model.context_size)
    # An agent may ask for shorter replies than the engine allows, never for longer ones.
    reply = min(max_reply or engine.max_reply, engine.max_reply)
    completion_tokens = min(max_turns * reply, max_tokens or context, context - 1)
    length = (
        context
        if observation_tokens is None
        else min(context, observation_tokens + completion_tokens)
    )
    num_image_tokens = sum(count_image_tokens(model, images))
    if num_image_tokens + 1 > length:
        raise ConfigError(
            f"the images of a conversation have {num_image_tokens} tokens, expected fewer than its "
            f"{length}; show fewer or smaller ones, or raise engine.max_context"
        )
    # between turns something is heard, which is scored too and masked
    prompt = length - completion_tokens if max_turns == 1 else 1
    rows = learner.micro_batch
    if learner.micro_batch_tokens is not None:
        rows = min(rows, max(1, learner.micro_batch_tokens // length))
    return ConversationSizes(prompt, length - prompt, completion_tokens, rows, tuple(images))


def shortest_conversations(
    model: "CausalLanguageModel", images: Sequence[ImageSize], rows: int
) -> ConversationSizes:
    """Return conversations that show images, and have one more token before a reply of one."""
    prompt = sum(count_image_tokens(model, images)) + 1
    return ConversationSizes(prompt, scored=1, completion_tokens=1, rows=rows, images=tuple(images))


def trace_conversations(model: "CausalLanguageModel", sizes: ConversationSizes) -> TracedPass:
    """Trace the passes of a micro-batch: arithmetic of one conversation, memory of all of them."""
    batch = prepare_conversations(model, sizes)
    found = trace_computation(
        model.network, model.blocks, lambda: score_conversations(model, sizes, batch)
    )
    return found.of_rows(sizes.rows, head=_count_head_bytes(model, sizes))


def trace_kept_conversations(model: "CausalLanguageModel", sizes: ConversationSizes) -> Kept:
    """Trace the memory of a micro-batch alone, in half of the time of `trace_conversations`."""
    batch = prepare_conversations(model, sizes)
    kept = kept_by_computation(
        model.network, model.blocks, lambda: score_conversations(model, sizes, batch)
    )
    return replace(kept, head=_count_head_bytes(model, sizes))


def _count_head_bytes(model: "CausalLanguageModel", sizes: ConversationSizes) -> int:
    """Return the bytes that the backward pass of the network's head needs."""
    from vla_rl.models.language.rows import LOGITS_AT_ONCE

    config: Any = model.network.config
    vocabulary = int(config.get_text_config().vocab_size)
    positions = sizes.rows * sizes.scored
    chunk = max(1, LOGITS_AT_ONCE // vocabulary)
    # without chunks, what is computed once more is among the activations
    each = GRADIENT_BYTES + (RECOMPUTED_BYTES if positions > chunk else 0)
    return each * min(positions, chunk) * vocabulary


def prepare_conversations(model: "CausalLanguageModel", sizes: ConversationSizes) -> Any:
    """Prepare the prompts of a micro-batch, and the images of its conversations, which are black."""
    images = [np.zeros((*size, 3), np.uint8) for size in sizes.images]
    lengths = count_image_tokens(model, sizes.images)
    starts = (np.cumsum(lengths) - lengths).tolist() if lengths else []
    # Each prompt is another, or they would be read once for all rows: those of a run may all differ.
    prompts = [np.full(sizes.prompt, row % len(model.token_ids)) for row in range(sizes.rows)]
    return model.prepare(
        [make_conversation_observation(prompt, images, starts) for prompt in prompts]
    )


def score_conversations(
    model: "CausalLanguageModel", sizes: ConversationSizes, batch: Any
) -> tuple[Tensor, Tensor]:
    """Score a micro-batch of conversations of one token, prepared before."""
    tokens = torch.zeros(sizes.rows, sizes.scored, dtype=torch.long)
    ends = [sizes.scored] * sizes.rows
    return model.score(batch, tokens, ends, torch.ones(sizes.rows))


def count_image_tokens(model: "CausalLanguageModel", images: Sequence[ImageSize]) -> list[int]:
    """Return the number of tokens of each image.

    Raises: ConfigError if the policy reads none.
    """
    from vla_rl.models.language import VisionLanguageModel

    if images and not isinstance(model, VisionLanguageModel):
        raise ConfigError(
            f"the conversations show images, but {type(model).__name__} reads text alone; take a "
            "policy with a vision tower, such as Qwen2.5-VL"
        )
    return [model.num_image_tokens(*size) for size in images]  # type: ignore[attr-defined]
