"""OpenVLA-OFT's network with discrete action tokens, decoded in parallel (Kim et al. 2025, arXiv:2502.19645).

    position  0     1 .. V      V + 1     V + 2 .. P + V       then 56 of them    then    then
    token     BOS   patches     proprio   prompt without BOS   placeholders       stop    padding

(without proprio everything after the patches moves one place down). Placeholders have an embedding of exactly zero and
differ by their position only. Attention is bidirectional; only padding is masked, and it stands last, so every row has the
positions it would have alone. Action token k is read one position before its placeholder: the first from the prompt's last
token, the last from the 55th placeholder. Departure from the paper: action tokens instead of an L1 head, as the RL
checkpoints have them, and only their rows of the head are computed.
"""

from typing import Final

from vla_rl.models import torchvision_ops  # noqa: F401  # has to come before transformers

# isort: split
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from vla_rl.models.openvla_oft.config import LlmConfig, OpenVlaOftConfig
from vla_rl.models.openvla_oft.processor import OpenVlaOftBatch
from vla_rl.models.vision import FusedVisionBackbone, Projector, ProprioProjector, build_tower

PLACEHOLDER_ID: Final = 1
STOP_ID: Final = 2


def llama_config(config: LlmConfig) -> LlamaConfig:
    """The trunk as transformers builds it, with bidirectional attention."""
    llama = LlamaConfig(
        vocab_size=config.table_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        rms_norm_eps=config.rms_norm_eps,
        pad_token_id=config.pad_token_id,
        use_cache=False,
    )
    # what every attention implementation and mask function of transformers reads; a causal trunk loses tens of points
    llama.is_causal = False
    return llama


class OpenVlaOftNetwork(nn.Module):
    """From a batch of observations to logits over the action tokens."""

    def __init__(self, config: OpenVlaOftConfig) -> None:
        super().__init__()
        self._num_action_tokens = config.num_action_tokens
        self._action_ids = slice(config.llm.vocab_size - config.num_bins, config.llm.vocab_size)
        self._pad_id = config.llm.pad_token_id
        self.vision_backbone = FusedVisionBackbone(
            *(
                build_tower(tower.timm_id, config.image_size, tower.overrides)
                for tower in (config.featurizer, config.fused_featurizer)
            )
        )
        width = config.llm.hidden_size
        self.projector = Projector(self.vision_backbone.width, width)
        self.proprio_projector = None
        if config.proprio is not None:
            self.proprio_projector = ProprioProjector(len(config.proprio.low), width)
        self.language_model = LlamaForCausalLM(llama_config(config.llm))  # type: ignore[no-untyped-call]
        # the mask made in `_attend` is boolean, which eager attention would add as 0 and 1
        self.language_model.set_attn_implementation("sdpa")

    def forward(self, batch: OpenVlaOftBatch) -> Tensor:
        """Logits over the action tokens, [B, T, num_bins], by rising token id; `batch` is on this network's device."""
        seen = [self.projector(self.vision_backbone(batch.images))]
        if self.proprio_projector is not None:
            assert batch.proprio is not None
            proprio = batch.proprio.to(self.proprio_projector.fc1.weight.dtype)
            seen.append(self.proprio_projector(proprio)[:, None])
        num_seen = sum(tokens.shape[1] for tokens in seen)
        embed = self.language_model.get_input_embeddings()
        text, is_placeholder = self._text(batch)
        words = embed(text).masked_fill(is_placeholder[..., None], 0.0)
        sequence = torch.cat([embed(batch.prompts[:, :1]), *seen, words], dim=1)
        hidden = self._attend(sequence, batch.prompt_lengths + num_seen + self._num_action_tokens + 1)
        # the last prompt token stands at num_seen + prompt_length - 1, and the first action token is read there
        first = batch.prompt_lengths[:, None] + (num_seen - 1)
        read = first + torch.arange(self._num_action_tokens, device=first.device)
        hidden = hidden.gather(1, read[..., None].expand(-1, -1, hidden.shape[2]))
        logits: Tensor = hidden @ self.language_model.lm_head.weight[self._action_ids].T
        return logits

    def hidden_states(self, sequence: Tensor, lengths: Tensor) -> Tensor:
        """The trunk's output for embedded tokens [B, L, D] of which each row's first `lengths` are not padding."""
        return self._attend(sequence, lengths)

    def _text(self, batch: OpenVlaOftBatch) -> tuple[Tensor, Tensor]:
        """Ids after the patches, [B, P - 1 + T + 1], and where the placeholders are."""
        rest = batch.prompts[:, 1:]
        text = nn.functional.pad(rest, (0, self._num_action_tokens + 1), value=self._pad_id)
        place = torch.arange(text.shape[1], device=text.device) - (batch.prompt_lengths[:, None] - 1)
        is_placeholder = (place >= 0) & (place < self._num_action_tokens)
        text = text.masked_fill(is_placeholder, PLACEHOLDER_ID)
        return text.masked_fill(place == self._num_action_tokens, STOP_ID), is_placeholder

    def _attend(self, sequence: Tensor, lengths: Tensor) -> Tensor:
        is_token = torch.arange(sequence.shape[1], device=lengths.device) < lengths[:, None]
        # 4-D, so that no library decides whether it is causal: True where a position may look, whoever asks
        mask = is_token[:, None, None, :].expand(-1, 1, sequence.shape[1], -1)
        output = self.language_model.model(inputs_embeds=sequence, attention_mask=mask, use_cache=False)
        hidden: Tensor = output.last_hidden_state
        return hidden
