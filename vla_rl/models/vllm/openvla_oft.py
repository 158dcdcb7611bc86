"""OpenVLA-OFT inside an engine process: a whole chunk in one bidirectional pass, sampled in the
engine.

    position  0     1 .. F      F + 1 .. F + P - 1    then T of them    then
    token     BOS   features    prompt without BOS    placeholders      stop

Number k is read one position before its placeholder, as in `OpenVlaOftNetwork`; the noise of a row
comes from its own seed, as in the torch engine, so both choose the same tokens from the same
logits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vla_rl.engines.sampling import choose_tokens
from vla_rl.engines.vllm.adapter import Pooler
from vla_rl.engines.vllm.served import POOLING_TASK
from vla_rl.models.openvla_oft.config import OpenVlaOftConfig
from vla_rl.models.vllm.prismatic import ServedPrismatic, policy_config, register_processor
from vla_rl.types import Sampling


class ActionPooler(Pooler):  # type: ignore[misc]
    """Reads, scores and samples the action tokens of every request of a step."""

    def __init__(self, config: OpenVlaOftConfig, model: "ServedOpenVlaOft") -> None:
        super().__init__()
        self._num_tokens, self._num_behind = (
            config.num_action_tokens,
            1 + int(config.has_stop_token),
        )
        self._rows = slice(config.llm.vocab_size - config.num_bins, config.llm.vocab_size)
        self._model = [model]  # in a list, so that it is not registered as a submodule

    def get_supported_tasks(self) -> set[str]:
        """Return the task whose parameters carry ours."""
        return {POOLING_TASK}

    def forward(self, hidden_states: Tensor, pooling_metadata: Any) -> list[Tensor]:
        """Return float32 [3, T] for each request: index among the action tokens, log-prob, weight
        version.
        """
        model = self._model[0]
        cursor = pooling_metadata.get_pooling_cursor()
        samplings = [_sampling(params.extra_kwargs) for params in pooling_metadata.pooling_params]
        last = cursor.last_token_indices_gpu
        place = (
            last[:, None]
            - self._num_behind
            - torch.arange(self._num_tokens - 1, -1, -1, device=last.device)
        )
        read = hidden_states[place.clamp(min=0)]  # vLLM's own dummies may be shorter than a chunk
        logits = read @ model.language_model.lm_head.weight[self._rows].T
        chosen, log_probs = choose_tokens(logits, samplings)
        version = torch.full_like(log_probs, model.weight_version)
        return list(torch.stack([chosen.float(), log_probs, version], dim=1))


def _sampling(values: Any) -> Sampling:
    return Sampling(**values) if values else Sampling()


@register_processor
class ServedOpenVlaOft(ServedPrismatic):
    """A bidirectional trunk behind two towers and a proprio projector."""

    is_pooling_model = True
    attn_type = "encoder_only"

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        policy: OpenVlaOftConfig = policy_config(vllm_config, OpenVlaOftConfig)
        super().__init__(vllm_config, policy, policy.proprio, prefix)
        self._placeholder_id = policy.llm.pad_token_id
        self.pooler = ActionPooler(policy, self)

    def embed_input_ids(
        self,
        input_ids: Tensor,
        multimodal_embeddings: Sequence[Tensor] | None = None,
        *,
        is_multimodal: Tensor | None = None,
    ) -> Tensor:
        """Embed words; placeholders are exactly zero; features replace their positions."""
        words: Tensor = self.language_model.model.embed_input_ids(input_ids)
        words = words.masked_fill((input_ids == self._placeholder_id)[:, None], 0.0)
        if not multimodal_embeddings:
            return words
        assert is_multimodal is not None
        embedded = words.clone()
        embedded[is_multimodal.to(words.device)] = torch.cat(list(multimodal_embeddings)).to(
            words.dtype
        )
        return embedded
