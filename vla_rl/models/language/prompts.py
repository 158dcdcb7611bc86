"""Prompts of a language policy, read from observations and checked."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import numpy as np

from vla_rl.types import Observation


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts of different lengths."""

    tokens: tuple[np.ndarray, ...]
    """Tokens of each prompt, int64 [P]."""

    grammars: tuple[tuple[tuple[int, int, str], ...], ...] = ()
    """Parts (start, stop, grammar) of each prompt's reply that were sampled under a grammar; empty
    if no reply has any."""

    @classmethod
    def read(cls, observations: Sequence[Observation], vocab_size: int) -> Self:
        """Read the prompts of observations.

        Raises: ValueError if `prompt_tokens` is missing, empty, or has unknown tokens.
        """
        return cls(
            tokens=tuple(_checked(observation, vocab_size) for observation in observations),
            grammars=tuple(tuple(observation.get("grammars", ())) for observation in observations),
        )


def _checked(observation: Observation, vocab_size: int) -> np.ndarray:
    prompt = np.asarray(observation.get("prompt_tokens", ()))
    if prompt.ndim != 1 or len(prompt) == 0 or prompt.dtype.kind != "i":
        raise ValueError(
            f"observation['prompt_tokens'] is {prompt.dtype} {list(prompt.shape)}, expected "
            "int64 [P] with P >= 1; was the episode run by chat_agent?"
        )
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        raise ValueError(
            f"observation['prompt_tokens'] holds token {prompt.max()}, expected 0 to "
            f"{vocab_size - 1}."
        )
    return prompt
