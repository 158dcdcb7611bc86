"""OpenVLA-OFT's network: a whole action chunk decoded in parallel (Kim et al. 2025,
arXiv:2502.19645).

    position  0     1 .. V     V + 1     ...     then the prompt     then T of them    then    then
    token     BOS   patches    proprio   time    without BOS         placeholders      stop    padding

(positions shift down if a checkpoint lacks one of these parts). Placeholders have an embedding of
exactly zero and differ by their position only; with diffusion they are the noisy numbers. Attention
is bidirectional; only padding is masked, and without any there is no mask. Padding stands last, so
each row has the same positions as it would have alone. Number k is read one position before its
placeholder: the first from the prompt's last token, the last from the placeholder before the last.

With FiLM the instruction scales and shifts every block of both vision towers (Perez et al. 2018,
arXiv:1709.07871):

    x = x + attention(x);  x = x * (1 + scale(c)) + shift(c);  x = x + mlp(x)        c: mean of the language embeddings
"""

from functools import partial
from typing import Final

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from vla_rl.models.openvla_oft.heads import DiffusionHead, L1Head, NoisyActionProjector, time_token
from vla_rl.models.prismatic.adapters import add_adapters
from vla_rl.models.prismatic.config import OpenVlaOftConfig
from vla_rl.models.prismatic.network import PrismaticNetwork, ProprioProjector
from vla_rl.models.prismatic.processor import PrismaticBatch
from vla_rl.models.prismatic.trunk import (
    bidirectional_mask,
    consecutive_positions,
    require_bidirectional,
)


class FilmBlock(nn.Module):
    """Scale and shift of one block; zero at first, so that a tower starts unchanged."""

    def __init__(self, condition_width: int, tower_width: int) -> None:
        super().__init__()
        # Zero at first: FiLM that is added to a trained policy changes nothing before it is
        # trained.
        self.scale, self.shift = (
            nn.Linear(condition_width, tower_width),
            nn.Linear(condition_width, tower_width),
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all parameters to zero."""
        for layer in (self.scale, self.shift):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Modulate [B, P, W] by [B, condition_width]."""
        return x * (1.0 + self.scale(condition)[:, None]) + self.shift(condition)[:, None]  # type: ignore[no-any-return]


class Film(nn.Module):
    """The FiLM layers of both towers."""

    def __init__(
        self, condition_width: int, featurizer: nn.Module, fused_featurizer: nn.Module
    ) -> None:
        super().__init__()
        self.featurizer = _build_film_blocks(condition_width, featurizer)
        self.fused_featurizer = _build_film_blocks(condition_width, fused_featurizer)


def _build_film_blocks(condition_width: int, tower: nn.Module) -> nn.ModuleList:
    width, num_blocks = int(tower.embed_dim), len(tower.blocks)  # type: ignore[arg-type]
    return nn.ModuleList([FilmBlock(condition_width, width) for _ in range(num_blocks)])


def apply_film(
    tower: nn.Module, blocks: nn.ModuleList, pixels: Tensor, condition: Tensor
) -> Tensor:
    """Return modulated patch features [B, P, W] of a timm ViT's second-to-last block, without
    prefix tokens.
    """
    x = tower.patch_embed(pixels)  # type: ignore[operator]
    x = tower.norm_pre(tower.patch_drop(tower._pos_embed(x)))  # type: ignore[operator]
    for block, film in zip(list(tower.blocks)[:-1], list(blocks)[:-1], strict=True):  # type: ignore[arg-type]
        x = x + block.drop_path1(block.ls1(block.attn(block.norm1(x))))
        x = film(x, condition)
        x = x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
    return x[:, tower.num_prefix_tokens :]  # type: ignore[no-any-return]


PLACEHOLDER_ID: Final = 1
STOP_ID: Final = 2


class OpenVlaOftNetwork(PrismaticNetwork):
    """Network from a batch of observations to the trunk's output at the action's positions, and to
    the head's output.
    """

    def __init__(self, config: OpenVlaOftConfig) -> None:
        super().__init__(config, is_causal=False)
        self._num_action_tokens = config.num_action_tokens
        self._num_stop_tokens = int(config.has_stop_token)
        self._action_ids = slice(config.llm.vocab_size - config.num_bins, config.llm.vocab_size)
        self._pad_id = config.llm.pad_token_id
        self._is_bidirectional = False
        width = config.llm.hidden_size
        self.proprio_projector = (
            ProprioProjector(len(config.proprio.low), width) if config.proprio else None
        )
        towers = (self.vision_backbone.featurizer, self.vision_backbone.fused_featurizer)
        self.film = Film(width, *towers) if config.has_film else None
        self.action_head: L1Head | DiffusionHead | None = None
        self.noisy_action_projector: NoisyActionProjector | None = None
        if config.head == "l1":
            self.action_head = L1Head(width, config.action_dim)
        elif config.head == "diffusion":
            self.action_head = DiffusionHead(width, config.action_dim)
            self.noisy_action_projector = NoisyActionProjector(width)
        if config.lora is not None:
            add_adapters(self, config.lora)

    def forward(self, batch: PrismaticBatch) -> Tensor:
        """Return the logits over the action tokens, [B, T, num_bins], by ascending token id;
        `batch` is on this network's device.
        """
        return self.read_logits(self.compute_trunk(batch))

    def regress(self, batch: PrismaticBatch) -> Tensor:
        """Return the chunk in [-1, 1] by the L1 head, [B, H, D]."""
        return self.read_chunk(self.compute_trunk(batch))

    def read_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits over the action tokens for the trunk's output [B, T, hidden_size]."""
        return self.head_logits(hidden, self._action_ids)

    def read_chunk(self, hidden: Tensor) -> Tensor:
        """Return the L1 head's chunk [B, H, D] for the trunk's output [B, T, hidden_size]."""
        assert isinstance(self.action_head, L1Head)
        actions: Tensor = self.action_head(hidden)
        return actions

    def predict_noise(
        self,
        batch: PrismaticBatch,
        noisy: Tensor,
        step: Tensor,
        observation_tokens: Tensor | None = None,
    ) -> Tensor:
        """Predict the noise in noisy chunks [B, H, D] at denoising steps int64 [B], by the
        diffusion head; `observation_tokens` as in `compute_trunk`.
        """
        assert isinstance(self.action_head, DiffusionHead)
        noise: Tensor = self.action_head(
            self.compute_trunk(batch, noisy.flatten(1), step, observation_tokens)
        )
        return noise

    def compute_trunk(
        self,
        batch: PrismaticBatch,
        noisy: Tensor | None = None,
        step: Tensor | None = None,
        observation_tokens: Tensor | None = None,
    ) -> Tensor:
        """Return the trunk's output at the positions where the action is read, [B, T, hidden_size].

        Args:
            batch: observations, on this network's device.
            noisy, step: with diffusion, the noisy numbers [B, T] and their denoising steps int64
                [B].
            observation_tokens: result of `embed_observation` for the same batch, to reuse it over several reads.
        """
        self._check_attention()
        embed = self.language_model.get_input_embeddings()
        text, is_placeholder = self._text(batch)
        # OpenVLA-OFT zeroes the placeholders, whatever ids stand there: they differ by their
        # position alone.
        embeddings = embed(text).masked_fill(is_placeholder[..., None], 0.0)
        if noisy is not None:
            assert self.noisy_action_projector is not None
            numbers = self.noisy_action_projector(noisy.to(embeddings.dtype))
            embeddings = embeddings.masked_scatter(is_placeholder[..., None], numbers)
        prefix = [
            self.embed_observation(batch) if observation_tokens is None else observation_tokens
        ]
        if step is not None:
            prefix.append(time_token(step, embeddings.shape[2]).to(embeddings.dtype)[:, None])
        num_observation_tokens = sum(tokens.shape[1] for tokens in prefix)
        sequence = torch.cat([embed(batch.prompts[:, :1]), *prefix, embeddings], dim=1)
        num_known = num_observation_tokens + self._num_action_tokens + self._num_stop_tokens
        lengths = batch.prompt_lengths + num_known if batch.is_padded else None
        # the last prompt token stands at num_seen + prompt_length - 1, and the first number is read
        # there
        first = batch.prompt_lengths + num_observation_tokens - 1
        return self.hidden_states(
            sequence, lengths, consecutive_positions(first, self._num_action_tokens)
        )

    def embed_observation(self, batch: PrismaticBatch) -> Tensor:
        """Embed images and proprioception for the trunk, [B, V, hidden_size]: the same for every
        denoising step.
        """
        observation_tokens: Tensor = self.projector(self._patches(batch))
        if self.proprio_projector is None:
            return observation_tokens
        assert batch.proprio is not None
        proprio = batch.proprio.to(self.proprio_projector.fc1.weight.dtype)
        return torch.cat(
            [
                observation_tokens,
                self.proprio_projector(proprio)[:, None].to(observation_tokens.dtype),
            ],
            dim=1,
        )

    def hidden_states(
        self, sequence: Tensor, lengths: Tensor | None, read: Tensor | None = None
    ) -> Tensor:
        """Return the trunk's output for embedded tokens [B, L, D].

        Args:
            sequence: embedded tokens.
            lengths: int64 [B]; in each row, all after them is padding. None: nothing is, so that
                attention needs no mask, which the flash kernel would not take.
            read: int64 [B, T], the positions wanted, if not all.
        """
        # Prompts of one length, such as a group's, need no mask; the flash kernel takes none.
        mask = None if lengths is None else bidirectional_mask(lengths, sequence.shape[1])
        output = self.language_model.model(
            inputs_embeds=sequence, attention_mask=mask, use_cache=False, read=read
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _patches(self, batch: PrismaticBatch) -> Tensor:
        if self.film is None:
            # Without FiLM the towers see images alone, so their features can be computed before
            # the text is known.
            return self.vision_backbone(batch.images)  # type: ignore[no-any-return]
        condition = self._language(batch).repeat_interleave(batch.images.shape[1], dim=0)
        return self.vision_backbone(batch.images, partial(self._run_tower, condition))  # type: ignore[no-any-return]

    def _run_tower(self, condition: Tensor, tower: nn.Module, pixels: Tensor, name: str) -> Tensor:
        return apply_film(tower, getattr(self.film, name), pixels, condition)

    def _language(self, batch: PrismaticBatch) -> Tensor:
        """Return the mean embedding [B, hidden_size] of the text around the action, with BOS and
        stop, without padding.
        """
        embed = self.language_model.get_input_embeddings()
        text, is_placeholder = self._text(batch)
        embeddings = embed(text)
        positions = torch.arange(embeddings.shape[1], device=embeddings.device)
        num_text = batch.prompt_lengths - 1 + self._num_action_tokens + self._num_stop_tokens
        is_language = (positions < num_text[:, None]) & ~is_placeholder
        summed = (embeddings * is_language[..., None]).sum(dim=1) + embed(batch.prompts[:, 0])
        mean: Tensor = summed / (is_language.sum(dim=1, keepdim=True) + 1)
        return mean

    def _text(self, batch: PrismaticBatch) -> tuple[Tensor, Tensor]:
        """Return the ids after the patches, [B, P - 1 + T + stop], and a mask of the
        placeholders.
        """
        rest = batch.prompts[:, 1:]
        text = nn.functional.pad(
            rest, (0, self._num_action_tokens + self._num_stop_tokens), value=self._pad_id
        )
        positions = torch.arange(text.shape[1], device=text.device) - (
            batch.prompt_lengths[:, None] - 1
        )
        is_placeholder = (positions >= 0) & (positions < self._num_action_tokens)
        text = text.masked_fill(is_placeholder, PLACEHOLDER_ID)
        # RLinf's checkpoints were trained without the stop token, so with it they would read
        # another sequence.
        if self._num_stop_tokens:
            text = text.masked_fill(positions == self._num_action_tokens, STOP_ID)
        return text, is_placeholder

    def _check_attention(self) -> None:
        """Check once that attention is bidirectional, in case the trunk was changed after it was
        built.
        """
        # while a pass is traced there are no numbers to compare
        if not self._is_bidirectional and detect_fake_mode() is None:
            weight = self.language_model.lm_head.weight
            require_bidirectional(self.hidden_states, weight.shape[1], weight)
            self._is_bidirectional = True
