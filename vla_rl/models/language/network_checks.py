"""Checks of a loaded language network: whether engines and learners compute what the network itself does.

    network ─► one output layer ─► whose logits are the network's ─► slots that hold its state ─► template

They run the network on two tokens, because no list of families or of fields would hold for the next one.
"""

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from vla_rl.errors import CheckpointError
from vla_rl.types import Message


def require_one_head(network: Any, source: str | Path) -> None:
    """Raise CheckpointError if the configuration ties the output layer to the embedding, and the weights have
    another one: vLLM and older versions of transformers take the embedding, transformers 5 the layer.
    """
    is_tied = getattr(network.config, "tie_word_embeddings", False)
    head, table = network.get_output_embeddings().weight, network.get_input_embeddings().weight
    if is_tied and head.data_ptr() != table.data_ptr():
        raise CheckpointError(
            f"{source}: config.json has tie_word_embeddings, but the weights hold another output layer than the "
            "embedding, and readers differ in which one they take; set tie_word_embeddings to false to use the "
            "layer, or remove lm_head.weight to use the embedding."
        )


def require_plain_head(network: Any, source: str | Path) -> None:
    """Raise CheckpointError if the network changes the logits of its output layer.

    Engines and learners apply that layer themselves, a part of the positions at a time. Granite divides its
    logits by a number, Cohere multiplies them, Gemma 2 bounds them: without it, another distribution would be
    sampled and trained than the saved network has.
    """
    seen: list[Tensor] = []
    hook = network.get_output_embeddings().register_forward_hook(
        lambda _module, _inputs, output: seen.append(output)
    )
    try:
        with torch.inference_mode():
            tokens = torch.zeros(1, 2, dtype=torch.long)
            logits = network(input_ids=tokens, use_cache=False).logits
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise CheckpointError(
            f"{source}: a {type(network).__name__} cannot read two tokens here ({type(error).__name__}: "
            f"{error}); take a checkpoint of another kind, or another version of transformers."
        ) from error
    finally:
        hook.remove()
    if not seen or not torch.allclose(logits.float(), seen[-1].float(), rtol=1e-3, atol=1e-5):
        raise CheckpointError(
            f"{source}: a {type(network).__name__} scales or bounds the logits of its output layer, which is "
            "not computed here, so that another policy would be trained than the one that is saved; take a "
            "checkpoint of another kind, such as Llama's or Qwen's."
        )


def require_readable(policy: Any, source: str | Path) -> None:
    """Raise CheckpointError if a policy cannot read tokens into the slots of an engine, or its chat template
    leaves out what a user says, as those for contents in parts do.

    DeepSeek's attention has keys and values of two widths, Llama 4's trunk returns something else.
    """
    try:
        policy.extend(policy.key_values(1), [0], [0], [[0, 0]])
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{source}: a {type(policy.network).__name__} cannot read a conversation here ({error}); expected "
            "one whose layers keep keys and values of one width; take a checkpoint of another kind, such as "
            "Llama's or Qwen's."
        ) from error
    prompts = set()
    for words in ("one", "two"):
        try:
            prompts.add(policy.render([Message(role="user", content=words)]).tobytes())
        except (
            ValueError
        ):  # such as a template that asks for a system message, which rendering reports
            return
    if len(prompts) == 1:
        raise CheckpointError(
            f"{source}: the chat template leaves out what a user says in a text, so all prompts would be alike; "
            "take the template of a checkpoint that chats in text."
        )


STRETCHED: Final = ("dynamic", "longrope")
"""Kinds of rotary positions whose frequencies change once any row of a batch is longer than in training."""


def get_context_size(config: Any) -> int:
    """Return the most tokens of a conversation, by a text configuration.

    With frequencies that change with the longest row of a batch, it is the length up to which they do not:
    beyond it, a reply's probabilities would depend on the rows that are computed with it.
    """
    size = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("rope_type") not in STRETCHED:
        return size
    own = getattr(config, "original_max_position_embeddings", None)
    return min(size, int(rope.get("original_max_position_embeddings") or own or size))
