"""OpenVLA and OpenVLA-OFT as vLLM serves them: engine layout, requests, weights."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
from torch import Tensor, nn

from vla_rl.engines.vllm.served import EngineFeature, EngineLayout, EngineRequest
from vla_rl.errors import ConfigError, ContextOverflow
from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft.network import STOP_ID
from vla_rl.models.openvla_oft.policy import OpenVlaOft
from vla_rl.models.prismatic.adapters import merged_tensors
from vla_rl.models.prismatic.processor import PrismaticBatch
from vla_rl.models.vllm.plugin import MODEL_TYPE, OPENVLA, OPENVLA_OFT
from vla_rl.models.vllm.serve import MODALITY
from vla_rl.types import Observation

MAX_PROMPT: Final = 256
"""Largest number of tokens of an instruction; LIBERO's longest has 35."""


class ServedPrismaticPolicy:
    """OpenVLA or OpenVLA-OFT, served. Implements `vla_rl.engines.vllm.served.ServedActions`.

    Raises: ConfigError if an engine cannot compute the policy as the learner does.
    """

    def __init__(self, policy: OpenVla | OpenVlaOft) -> None:
        self._policy, config = policy, policy.config
        _refuse_unservable(policy)
        self._is_oft = isinstance(policy, OpenVlaOft)
        towers: Any = policy.network.vision_backbone
        self._num_features = len(config.cameras) * int(towers.featurizer.patch_embed.num_patches)
        self._tail: list[int] = []
        pad = config.llm.pad_token_id
        if isinstance(policy, OpenVlaOft):
            self._num_features += policy.config.proprio is not None
            self._tail = [pad] * policy.config.num_action_tokens + [
                STOP_ID
            ] * policy.config.has_stop_token
            num_tokens = policy.config.num_action_tokens
        else:
            num_tokens = config.action_dim
        self._placeholders = [pad] * self._num_features
        self.network: nn.Module = policy.network
        self.token_ids = policy.token_ids
        self.layout = self._build_layout(num_tokens)
        """Pooling for OpenVLA-OFT, generation for OpenVLA."""

    def tensors(self, network: nn.Module) -> Mapping[str, Tensor]:
        """Return the parameters by the network's own names, with adapters merged."""
        return merged_tensors(network)

    def request(self, observation: Observation) -> EngineRequest:
        """Build a request: BOS, features, prompt, and for OpenVLA-OFT the placeholders of its
        chunk.
        """
        return self._build_request(self._policy.prepare([observation]))

    def sample_request(self) -> EngineRequest:
        """Return a request of black images and a short instruction."""
        config = self._policy.config
        frame = np.zeros((config.image_size, config.image_size, 3), np.uint8)
        observation: dict[str, Any] = dict.fromkeys(config.cameras, frame) | {"instruction": "wait"}
        if isinstance(self._policy, OpenVlaOft) and self._policy.config.proprio is not None:
            proprio = self._policy.config.proprio
            observation[proprio.key] = np.array(proprio.low, np.float32)
        return self.request(observation)

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Map tokens int64 [T] to actions float32 [H, D]."""
        chunk: np.ndarray = self._policy.decode(tokens[None])[0]
        return chunk

    def _build_request(self, batch: PrismaticBatch) -> EngineRequest:
        ids = batch.prompts[0].tolist()
        if len(ids) > MAX_PROMPT:
            raise ContextOverflow(len(ids), MAX_PROMPT)
        values = {"images": batch.images.cpu()[0]}
        if batch.proprio is not None:
            values["proprio"] = batch.proprio.cpu()[0]
        return EngineRequest(
            token_ids=[ids[0], *self._placeholders, *ids[1:], *self._tail],
            features=(EngineFeature(1, self._num_features, values),),
        )

    def _build_layout(self, num_tokens: int) -> EngineLayout:
        from vla_rl.models.vllm.plugin import trunk_config

        config = self._policy.config
        context_size = 1 + self._num_features + MAX_PROMPT + num_tokens + 1
        llm = config.llm
        allowed = range(llm.vocab_size - config.num_bins, llm.vocab_size)
        is_free = isinstance(self._policy, OpenVla) and self._policy.config.vocabulary == "all"
        return EngineLayout(
            config={
                "model_type": MODEL_TYPE,
                "architectures": [OPENVLA_OFT if self._is_oft else OPENVLA],
                "is_causal": not self._is_oft,
                "policy": msgspec.to_builtins(config),
                "num_features": self._num_features,
                "text_config": trunk_config(llm, context_size, is_causal=not self._is_oft),
            },
            runner="pooling" if self._is_oft else "generate",
            context_size=context_size,
            num_tokens=num_tokens,
            allowed_tokens=None if is_free else allowed,
            features=MODALITY,
        )


def serve_prismatic(
    policy: OpenVla | OpenVlaOft, max_context: int | None, max_images: int
) -> ServedPrismaticPolicy:
    """Return the form that engines serve; the arguments besides are language models'.

    Raises: ConfigError if an engine cannot compute the policy as the learner does.
    """
    return ServedPrismaticPolicy(policy)


def _refuse_unservable(policy: OpenVla | OpenVlaOft) -> None:
    config = policy.config
    # Refused before an engine starts, which takes 10 s or more.
    reasons = {
        "has_film": isinstance(policy, OpenVlaOft) and policy.config.has_film,
        "rope_inv_freq_dtype": config.llm.rope_inv_freq_dtype != "float32",
    }
    wrong = [name for name, is_wrong in reasons.items() if is_wrong]
    if wrong:
        raise ConfigError(
            f"engine 'vllm' cannot serve this {type(policy).__name__}: {' and '.join(wrong)} of "
            "its config (FiLM looks at the text before the images; rounded rotary frequencies) "
            "are computed by engine 'torch' alone."
        )
