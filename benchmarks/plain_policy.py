"""OpenVLA-OFT in the common way for reinforcement learning: the peer of `policy_inference` and
`learner_step`.

It has the same weights and results. Images are converted to float32 pixels at once, one after the
other; both towers run to their last block; logits are computed over the whole vocabulary, and the
action tokens cut out; an update computes each chunk of the longest possible episode, executed or
not, with a forward and a backward pass.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.models.openvla_oft.network import PLACEHOLDER_ID, STOP_ID, OpenVlaOftNetwork
from vla_rl.models.prismatic.config import PUBLIC_PIXELS, OpenVlaOftConfig
from vla_rl.models.prismatic.processor import format_prompt
from vla_rl.types import Observation, Trajectory


class PlainPolicy:
    """Runs an `OpenVlaOftNetwork` (tokens, one or several images, with or without proprio) in the
    common way.
    """

    def __init__(
        self, config: OpenVlaOftConfig, network: OpenVlaOftNetwork, tokenizer: object
    ) -> None:
        self._config, self._network, self._tokenizer = config, network, tokenizer
        self._device = next(network.parameters()).device
        self._dtype = next(network.parameters()).dtype

    def act(self, observations: Sequence[Observation], temperature: float) -> np.ndarray:
        """Return sampled token ids, int64 [B, T]."""
        with torch.inference_mode():
            logits = self.action_logits(self.pixels(observations), observations)
            probabilities = torch.softmax(logits.float() / temperature, dim=-1)
            chosen = torch.multinomial(probabilities.flatten(0, 1), 1).view(probabilities.shape[:2])
        return (chosen + self._first_id).cpu().numpy()

    def update(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[float], num_chunks: int
    ) -> None:
        """Compute gradients of the clipped surrogate over `num_chunks` chunks a trajectory.

        Unexecuted ones are masked.
        """
        pixels = [
            self.pixels([step.observation for step in trajectory.steps])
            for trajectory in trajectories
        ]
        num_tokens = (
            sum(len(trajectory.steps) for trajectory in trajectories)
            * self._config.num_action_tokens
        )
        for chunk in range(num_chunks):
            indices = [min(chunk, len(trajectory.steps) - 1) for trajectory in trajectories]
            has_full_chunk = [chunk < len(trajectory.steps) for trajectory in trajectories]
            steps = [
                trajectory.steps[step_index]
                for trajectory, step_index in zip(trajectories, indices, strict=True)
            ]
            seen = torch.stack(
                [rows[step_index] for rows, step_index in zip(pixels, indices, strict=True)]
            )
            logits = self.action_logits(seen, [step.observation for step in steps])
            tokens = torch.from_numpy(np.stack([step.chunk.tokens for step in steps])).to(
                self._device
            )
            behavior = torch.from_numpy(np.stack([step.chunk.log_probs for step in steps])).to(
                self._device
            )
            log_probs = torch.log_softmax(logits.float(), dim=-1).gather(
                -1, (tokens - self._first_id)[..., None]
            )[..., 0]
            ratio = (log_probs - behavior).exp()
            advantage = torch.tensor(advantages, device=self._device)[:, None]
            losses = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
            mask = torch.tensor(has_full_chunk, device=self._device)[:, None]
            torch.autograd.backward((losses * mask).sum() / num_tokens)

    def pixels(self, observations: Sequence[Observation]) -> Tensor:
        """Return float32 [B, cameras, 6, S, S], normalised for both towers, image by image."""
        return torch.stack(
            [
                torch.stack([self._normalised(seen[key]) for key in self._config.cameras])
                for seen in observations
            ]
        ).to(self._device)

    def action_logits(self, pixels: Tensor, observations: Sequence[Observation]) -> Tensor:
        """Return [B, T, num_bins], cut out of the logits over the whole vocabulary."""
        network, config = self._network, self._config
        patches = torch.cat(
            [network.projector(self._towers(pixels[:, index])) for index in range(pixels.shape[1])],
            1,
        )
        embed = network.language_model.get_input_embeddings()
        tokenizer: Any = self._tokenizer
        ids = [tokenizer.encode(format_prompt(seen["instruction"])).ids for seen in observations]
        if len({len(row) for row in ids}) != 1:
            raise ValueError("the plain policy takes prompts of one length; compare on one task.")
        text = torch.tensor(ids, device=self._device)
        num_tokens, batch = config.num_action_tokens, len(ids)
        tail = torch.full((batch, num_tokens), PLACEHOLDER_ID, device=self._device)
        words = torch.cat([embed(text), torch.zeros_like(embed(tail))], dim=1)
        seen_tokens = [words[:, :1], patches]
        if network.proprio_projector is not None and config.proprio is not None:
            low, high = (
                torch.tensor(ends, device=self._device)
                for ends in (config.proprio.low, config.proprio.high)
            )
            state = torch.from_numpy(
                np.stack([seen[config.proprio.key] for seen in observations])
            ).to(self._device)
            unit = (2.0 * (state - low) / (high - low + 1e-8) - 1.0).clamp(-1.0, 1.0)
            seen_tokens.append(network.proprio_projector(unit.to(self._dtype))[:, None])
        stop = embed(torch.full((batch, 1), STOP_ID, device=self._device))
        sequence = torch.cat([*seen_tokens, words[:, 1:], stop], dim=1)
        length = sequence.shape[1]
        mask = torch.ones(batch, 1, length, length, dtype=torch.bool, device=self._device)
        logits: Tensor = network.language_model(
            inputs_embeds=sequence, attention_mask=mask, use_cache=False
        ).logits
        return logits[
            :,
            length - num_tokens - 2 : length - 2,
            self._first_id : self._first_id + config.num_bins,
        ]

    @property
    def _first_id(self) -> int:
        return self._config.llm.vocab_size - self._config.num_bins

    def _normalised(self, frame: np.ndarray) -> Tensor:
        size = self._config.image_size
        image = torch.from_numpy(frame).permute(2, 0, 1)[None]
        if image.shape[-2:] != (size, size):
            image = nn.functional.interpolate(
                image, size=(size, size), mode="bicubic", antialias=True
            )
        unit = image[0].float() / 255.0
        both = [
            (unit - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
            for mean, std in zip(PUBLIC_PIXELS.means, PUBLIC_PIXELS.stds, strict=True)
        ]
        return torch.cat(both)

    def _towers(self, pixels: Tensor) -> Tensor:
        backbone = self._network.vision_backbone
        features = []
        for tower, channels in (
            (backbone.featurizer, pixels[:, :3]),
            (backbone.fused_featurizer, pixels[:, 3:]),
        ):
            last = len(tower.blocks) - 2  # type: ignore[arg-type]
            pixels_of = channels.to(self._dtype)
            (seen,) = tower.get_intermediate_layers(pixels_of, n={last})  # type: ignore[operator]
            features.append(seen)
        return torch.cat(features, dim=-1)
