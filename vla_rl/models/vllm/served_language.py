"""Language models as vLLM serves them: engine layout, requests, weights."""

import hashlib
from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.engines.chat_interface import Question
from vla_rl.engines.vllm.served import EngineFeature, EngineLayout, EngineRequest
from vla_rl.models.language import CausalLanguageModel
from vla_rl.models.language.checkpoint import distinct_tensors
from vla_rl.models.language.vision_policy import VisionLanguageModel
from vla_rl.models.vllm.serve import MODALITY

IDEFICS3: Final = {
    "model_type": "idefics3",
    "architectures": ["Idefics3ForConditionalGeneration"],
}


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


def serve_language(
    policy: CausalLanguageModel, max_context: int | None, max_images: int
) -> ServedLanguageModel:
    """Return the form that engines serve; arguments as of `ServedLanguageModel`."""
    return ServedLanguageModel(policy, max_context, max_images)


def content_digest(image: np.ndarray) -> str:
    """Return the SHA-256 of an image's size and pixels, by which vLLM keeps what it computed."""
    digest = hashlib.sha256(str(image.shape).encode())
    digest.update(np.ascontiguousarray(image).data)
    return digest.hexdigest()
