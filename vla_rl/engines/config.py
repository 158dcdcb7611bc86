"""Configuration of engines; imports in an instant, without torch."""

from typing import Literal

from vla_rl.engines.vllm.config import VllmConfig
from vla_rl.types import Config


class EngineConfig(Config, frozen=True, kw_only=True):
    """Which engine decides, and how decisions are batched."""

    kind: Literal["torch", "vllm"] = "torch"
    """`torch`: in this process, with the learner's weights; `vllm`: in processes of its own, as `engine.vllm` says."""

    vllm: VllmConfig = VllmConfig()

    max_batch: int = 16
    """Most decisions computed together."""

    max_wait_s: float = 0.0
    """How long a free device waits for a fuller batch, from the arrival of the oldest request; 0 fires at once."""

    is_deterministic: bool = False
    """Batches of exactly one, so that the last bit of an answer does not depend on who waited beside it."""

    cuda_graphs: bool = True
    """On a GPU, record what an OpenVLA policy computes to act, once for each size of batch, and replay it."""

    max_context: int | None = None
    """Of a language policy: most tokens of a prompt and its reply together; none takes the model's own limit."""

    max_reply: int = 512
    """Of a language policy: most tokens of one reply."""

    kept_conversations: int = 16
    """Of a language policy: conversations whose keys and values are kept between their turns, beside those that run; the
    beginnings they share with a new prompt are not read again. 0 keeps none."""

    def __post_init__(self) -> None:
        self.require(self.max_context is None or self.max_context >= 2, "max_context", "at least 2 tokens, or none")
        self.require(self.max_reply >= 1, "max_reply", "at least 1 token")
        self.require(self.kept_conversations >= 0, "kept_conversations", "at least 0")
        self.require(self.max_batch >= 1, "max_batch", "at least 1 decision")
        self.require(self.max_wait_s >= 0.0, "max_wait_s", "at least 0 seconds")
