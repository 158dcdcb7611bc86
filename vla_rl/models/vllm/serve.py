"""Policies as vLLM serves them: engine layout, requests, weights."""

import hashlib
from collections.abc import Mapping
from typing import Any, Final, overload

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.engines.chat_interface import Question
from vla_rl.engines.vllm.served import EngineFeature, EngineLayout, EngineRequest
from vla_rl.errors import ConfigError, ContextOverflow
from vla_rl.models.language import CausalLanguageModel
from vla_rl.models.language.checkpoint import distinct_tensors
from vla_rl.models.language.vision_policy import VisionLanguageModel
from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft.network import STOP_ID
from vla_rl.models.openvla_oft.policy import OpenVlaOft
from vla_rl.models.prismatic.adapters import merged_tensors
from vla_rl.models.prismatic.processor import PrismaticBatch
from vla_rl.models.vllm.plugin import MODEL_TYPE, OPENVLA, OPENVLA_OFT
from vla_rl.types import Observation

MAX_PROMPT: Final = 256
"""Largest number of tokens of an instruction; LIBERO's longest has 35."""

MODALITY: Final = "image"


IDEFICS3: Final = {
    "model_type": "idefics3",
    "architectures": ["Idefics3ForConditionalGeneration"],
}


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


class ServedLanguageModel:
    """A language model that vLLM loads by its own `config.json`. Implements `ServedLanguage`.

    Args:
        policy: the language model, with a vision tower or without.
        max_context: largest number of tokens of a prompt and its reply; None for the model's full
            context.
        max_images: largest number of images in a conversation.
    """

    def __init__(
        self, policy: CausalLanguageModel, max_context: int | None = None, max_images: int = 1
    ) -> None:
        self.chat, self.network = policy, policy.network
        context_size = min(policy.context_size, max_context or policy.context_size)
        files = dict(policy.checkpoint_files())
        config = msgspec.json.decode(files.pop("config.json"))
        if config["model_type"] == "smolvlm":
            # vLLM's class is that of Idefics3 with another processor, which needs a package more
            config |= IDEFICS3
        self.layout = EngineLayout(
            config=config,
            runner="generate",
            context_size=context_size,
            num_tokens=None,
            files=files,
            reuses_prefixes=True,
            features=MODALITY if policy.reads_images else None,
            max_features=max_images,
        )

    def tensors(self, network: nn.Module) -> Mapping[str, Tensor]:
        """Return each parameter once, by transformers' name."""
        return distinct_tensors(network)

    def request(self, asked: Question) -> EngineRequest:
        """Turn a question into a request, with its images if it has some."""
        if asked.image_prompt is None:
            return EngineRequest(asked.tokens.tolist())
        assert isinstance(self.chat, VisionLanguageModel)
        features = tuple(
            EngineFeature(
                start=start,
                length=len(item.is_part),
                values=item.values,
                rows=item.rows,
                is_part=None if item.is_part.all() else torch.from_numpy(item.is_part),
                digest=content_digest(image),
            )
            for image, start, item in zip(
                asked.images,
                asked.image_prompt.image_starts.tolist(),
                self.chat.split_images(asked.image_prompt),
                strict=True,
            )
        )
        return EngineRequest(asked.tokens.tolist(), features)

    def sample_request(self) -> EngineRequest:
        """Return a request with a prompt of one token."""
        return EngineRequest(token_ids=[min(self.chat.stop_tokens)])


def content_digest(image: np.ndarray) -> str:
    """Return the SHA-256 of an image's size and pixels, by which vLLM keeps what it computed."""
    digest = hashlib.sha256(str(image.shape).encode())
    digest.update(np.ascontiguousarray(image).data)
    return digest.hexdigest()


@overload
def serve(
    policy: OpenVla | OpenVlaOft, *, max_context: int | None = None, max_images: int = 1
) -> ServedPrismaticPolicy: ...
@overload
def serve(
    policy: CausalLanguageModel, *, max_context: int | None = None, max_images: int = 1
) -> ServedLanguageModel: ...
@overload
def serve(
    policy: Any, *, max_context: int | None = None, max_images: int = 1
) -> ServedPrismaticPolicy | ServedLanguageModel: ...
def serve(
    policy: Any, *, max_context: int | None = None, max_images: int = 1
) -> ServedPrismaticPolicy | ServedLanguageModel:
    """Wrap a policy for `VllmEngine`.

    Args:
        policy: the policy.
        max_context: shortens a language model's context.
        max_images: largest number of images that a conversation shows to a language model.

    Raises: ConfigError for a policy that no engine can serve.
    """
    if isinstance(policy, CausalLanguageModel):
        return ServedLanguageModel(policy, max_context, max_images)
    if isinstance(policy, OpenVla | OpenVlaOft):
        return ServedPrismaticPolicy(policy)
    raise ConfigError(
        f"engine 'vllm' cannot serve {type(policy).__name__}; expected OpenVla, OpenVlaOft (with "
        "the head `tokens`) or CausalLanguageModel. Take engine 'torch'."
    )


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
