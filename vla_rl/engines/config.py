"""Configuration of engines. Importing it does not import torch."""

from collections.abc import Mapping
from typing import Literal

from vla_rl.engines.remote.config import RemoteConfig
from vla_rl.engines.vllm.config import VllmConfig
from vla_rl.types import Config


class EngineConfig(Config, frozen=True, kw_only=True):
    """Settings of the engine that makes the decisions, and of its batches."""

    kind: Literal["torch", "vllm", "remote"] = "torch"
    """Engine that runs the policy. `torch`: in this process, with the learner's weights. `vllm`: in
    separate vLLM processes, set up with `engine.vllm`. `remote` (language policies): on vLLM or SGLang
    servers that run elsewhere, named in `engine.remote`."""

    vllm: VllmConfig = VllmConfig()

    remote: RemoteConfig = RemoteConfig()

    max_batch: int = 16
    """Maximum number of decisions computed in one batch."""

    max_wait_s: float = 0.0
    """Seconds that an idle device waits for a fuller batch, counted from the oldest request; 0
    starts at once."""

    is_deterministic: bool = False
    """Compute every decision in a batch of one, so that results are the same to the last bit
    whatever else is waiting. Slower; use it to reproduce a run."""

    cuda_graphs: bool = True
    """Record an OpenVLA policy's computation of actions as a CUDA graph, once per batch size, and
    replay it (GPU only)."""

    max_context: int | None = None
    """Language policies only: maximum tokens of a prompt and its reply together; none takes the
    model's own limit."""

    max_reply: int = 512
    """Language policies only: maximum tokens of one reply."""

    kept_conversations: int = 16
    """Language policies only: number of idle conversations whose keys and values are kept between
    their turns, so that the beginning they share with a new prompt is not computed again. 0 keeps
    none."""

    def __post_init__(self) -> None:
        self.require(
            self.max_context is None or self.max_context >= 2,
            "max_context",
            "at least 2 tokens, or none",
        )
        self.require(self.max_reply >= 1, "max_reply", "at least 1 token")
        self.require(self.kept_conversations >= 0, "kept_conversations", "at least 0")
        self.require(self.max_batch >= 1, "max_batch", "at least 1 decision")
        self.require(self.max_wait_s >= 0.0, "max_wait_s", "at least 0 seconds")

    def unread(self) -> Mapping[str, str]:
        """Return the options of the other kinds of engine."""
        torch_only = ("max_batch", "max_wait_s", "cuda_graphs", "kept_conversations")
        others = {"vllm", "remote"} - {self.kind} | set(torch_only if self.kind != "torch" else ())
        return dict.fromkeys(sorted(others), f"engine.kind is '{self.kind}'")
