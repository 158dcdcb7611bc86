"""Networks of pi0 and pi0.5: PaliGemma reads images and prompt, a smaller expert moves the actions.

    images ─► SigLIP ─┐
    prompt ─► table ──┴─► Gemma ─► keys, values of each layer ─┐                   `embed_prefix`
    pi0:   [state token, noised actions x time] ─► expert ─────┴─► velocity        `velocity`
    pi0.5: [noised actions], time in every norm ─► expert ─────┴─► velocity

Images and prompt see each other; pi0's state token sees them and itself; the actions see all before and
each other (Black et al. 2024, arXiv:2410.24164; Physical Intelligence 2025, arXiv:2504.16054). SigLIP,
Gemma's projections and MLPs are transformers'. Parameters have the names of LeRobot 0.6 without its
prefix `model.`; `pi_tensors` knows the others.
"""

from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers.models.paligemma.configuration_paligemma import PaliGemmaConfig
from transformers.models.paligemma.modeling_paligemma import PaliGemmaModel
from transformers.models.siglip.configuration_siglip import SiglipVisionConfig

from vla_rl.models.flow.network import FlowInputs, Prefix, embed_time
from vla_rl.models.flow.pi_layers import (
    GemmaSize,
    LayerContext,
    PiLayer,
    additive_mask,
    apply_norm,
    linear_dtype,
    make_norm,
    rotary_tables,
    run_layers,
)
from vla_rl.types import Config, PositiveInt

PiKind: TypeAlias = Literal["pi0", "pi05"]

GEMMA_SIZES: Final = {
    "gemma_2b": GemmaSize(width=2048, depth=18, mlp_width=16_384),
    "gemma_300m": GemmaSize(width=1024, depth=18, mlp_width=4096),
}
"""Sizes by the names that `config.json` of both projects has."""


TIME_PERIODS: Final = (4e-3, 4.0)
"""Shortest and longest period of the embedding of the time."""


class VisionSize(Config, frozen=True, kw_only=True):
    """Sizes of a SigLIP tower; the defaults are SigLIP So400m's at 224 pixels."""

    width: PositiveInt = 1152
    """Width of hidden states."""

    depth: PositiveInt = 27
    """Number of layers."""

    mlp_width: PositiveInt = 4304
    """Width inside of the MLPs."""

    num_heads: PositiveInt = 16
    """Attention heads."""

    patch: PositiveInt = 14
    """Pixels along a side of a patch."""

    image_size: PositiveInt = 224
    """Pixels along a side of an image."""

    @property
    def num_tokens(self) -> int:
        """Tokens of an image."""
        return (self.image_size // self.patch) ** 2


class PiSize(Config, frozen=True, kw_only=True):
    """Sizes of a pi0 or pi0.5 network. The defaults are the public ones."""

    kind: PiKind
    """pi0: a state token, plain norms; pi05: the state stands in the prompt, adaptive norms."""

    text: GemmaSize = GEMMA_SIZES["gemma_2b"]
    """The trunk that reads the prefix."""

    expert: GemmaSize = GEMMA_SIZES["gemma_300m"]
    """The trunk that reads the actions; as many layers and key heads as `text`."""

    vision: VisionSize = VisionSize()
    """The tower that reads images."""

    vocabulary: PositiveInt = 257_152
    """Rows of the table of tokens."""

    action_dim: PositiveInt = 32
    """Width of a padded action."""

    state_dim: PositiveInt = 32
    """Width of a padded state; pi0.5 reads the state in the prompt."""

    horizon: PositiveInt = 50
    """Rows of a chunk."""

    def __post_init__(self) -> None:
        same = ("depth", "num_key_heads", "head_size")
        fits = all(getattr(self.text, name) == getattr(self.expert, name) for name in same)
        self.require(fits, "expert", f"the same {', '.join(same)} as the text trunk, {self.text}")


class PiExpert(nn.Module):
    """The layers that read the actions.

    Args:
        size: sizes of the trunk.
        is_adaptive: whether its norms follow the time.
    """

    def __init__(self, size: GemmaSize, is_adaptive: bool) -> None:
        super().__init__()
        config = size.make_config()
        self.layers = nn.ModuleList(
            PiLayer(config, index, is_adaptive=is_adaptive) for index in range(size.depth)
        )
        self.norm = make_norm(config, is_adaptive)


class PiNetwork(nn.Module):
    """A pi0 or pi0.5, with random weights. It is a `FlowNetwork`.

    Args:
        size: which of the two, and its sizes.
    """

    def __init__(self, size: PiSize) -> None:
        super().__init__()
        self.size = size
        # Submodules without a class of their own: their only purpose is the public names.
        both: Any = nn.Module()
        self.paligemma_with_expert: Any = both
        both.paligemma, both.gemma_expert = nn.Module(), nn.Module()
        both.paligemma.model = build_paligemma(size)
        both.gemma_expert.model = PiExpert(size.expert, is_adaptive=size.kind == "pi05")
        width = size.expert.width
        self.action_in_proj = nn.Linear(size.action_dim, width)
        self.action_out_proj = nn.Linear(width, size.action_dim)
        if size.kind == "pi0":
            self.state_proj = nn.Linear(size.state_dim, width)
            self.action_time_mlp_in = nn.Linear(2 * width, width)
            self.action_time_mlp_out = nn.Linear(width, width)
        else:
            self.time_mlp_in = nn.Linear(width, width)
            self.time_mlp_out = nn.Linear(width, width)

    @property
    def horizon(self) -> int:
        """Rows of a chunk."""
        return self.size.horizon

    @property
    def action_dim(self) -> int:
        """Width of a padded action."""
        return self.size.action_dim

    @property
    def feature_size(self) -> int:
        """Width of the text trunk."""
        return self.size.text.width

    @property
    def paligemma(self) -> Any:
        """SigLIP, projector and Gemma."""
        return self.paligemma_with_expert.paligemma.model

    @property
    def expert(self) -> PiExpert:
        """The layers that read the actions."""
        expert = self.paligemma_with_expert.gemma_expert.model
        assert isinstance(expert, PiExpert)
        return expert

    def prefix_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of PaliGemma: the state's token, if there is one, is the expert's."""
        return list(self.paligemma.parameters())

    def embed_tokens(self, inputs: FlowInputs) -> tuple[Tensor, Tensor]:
        """Embed images and prompt, before the first layer.

        Returns: embeddings [B, L, width], and bool [B, L], False for padding and missing cameras.
        """
        images = self._embed_images(inputs.images)
        # transformers' table multiplies by the root of the width, as openpi does; images are not scaled
        text = self.paligemma.language_model.embed_tokens(inputs.tokens)
        num_tokens = images.shape[1] // inputs.image_mask.shape[1]
        image_mask = inputs.image_mask.repeat_interleave(num_tokens, dim=1)
        embedded = torch.cat([images.to(text.dtype), text], dim=1)
        return embedded, torch.cat([image_mask, inputs.token_mask], dim=1)

    def embed_prefix(self, inputs: FlowInputs) -> Prefix:
        """Run PaliGemma on images and prompt; its keys and values serve every step of the chain."""
        hidden, mask = self.embed_tokens(inputs)
        trunk = self.paligemma.language_model
        hidden = hidden.to(linear_dtype(trunk.layers))
        positions = mask.long().cumsum(1) - 1
        visible = mask[:, :, None] & mask[:, None, :]
        tables = rotary_tables(positions, self.size.text.head_size, hidden.dtype)
        context = LayerContext(*tables, additive_mask(visible))
        hidden, keys, values = run_layers(trunk.layers, hidden, context)
        return Prefix(keys, values, mask, positions, trunk.norm(hidden), inputs.state)

    def velocity(self, prefix: Prefix, x: Tensor, time: Tensor) -> Tensor:
        """Predict noise - actions, float32 [N, H, P], from chunks [N, H, P] at times [N]."""
        hidden = self.read_chunk(prefix, x, time).to(self.action_out_proj.weight.dtype)
        velocity: Tensor = self.action_out_proj(hidden)
        return velocity.float()

    def read_chunk(self, prefix: Prefix, x: Tensor, time: Tensor) -> Tensor:
        """Return the expert's last hidden states of a chunk's rows, [N, H, width]."""
        hidden, condition = self._embed_chunk(prefix.state, x, time), self._condition(time)
        return self._run_expert(prefix, hidden, condition)[:, -x.shape[1] :]

    def features(self, prefix: Prefix) -> Tensor:
        """Return the mean of the trunk's last hidden states over unmasked tokens, [B, width]."""
        weights = prefix.mask[..., None].to(prefix.output.dtype)
        mean: Tensor = (prefix.output * weights).sum(1) / weights.sum(1).clamp_min(1.0)
        return mean

    def _embed_images(self, images: Tensor) -> Tensor:
        """Embed images [B, C, 3, S, S]: [B, C * tokens, width of the text]."""
        tower = self.paligemma.vision_tower
        # openpi stores the first embeddings in float32 and the layers in bfloat16, which
        # transformers' own forward does not take
        hidden = tower.embeddings(images.flatten(0, 1))
        hidden = hidden.to(tower.encoder.layers[0].mlp.fc1.weight.dtype)
        hidden = tower.post_layernorm(tower.encoder(inputs_embeds=hidden).last_hidden_state)
        embedded: Tensor = self.paligemma.multi_modal_projector(hidden)
        return embedded.reshape(len(images), -1, embedded.shape[-1])

    def _embed_chunk(self, state: Tensor, x: Tensor, time: Tensor) -> Tensor:
        dtype = self.action_in_proj.weight.dtype
        actions: Tensor = self.action_in_proj(x.to(dtype))
        if self.size.kind == "pi05":
            return actions
        times = embed_time(time, self.size.expert.width, *TIME_PERIODS).to(dtype)
        both = torch.cat([actions, times[:, None].expand_as(actions)], dim=-1)
        tokens = self.action_time_mlp_out(nn.functional.silu(self.action_time_mlp_in(both)))
        return torch.cat([self.state_proj(state.to(dtype))[:, None], tokens], dim=1)

    def _condition(self, time: Tensor) -> Tensor | None:
        if self.size.kind == "pi0":
            return None
        silu = nn.functional.silu
        dtype = self.time_mlp_in.weight.dtype
        times = embed_time(time, self.size.expert.width, *TIME_PERIODS).to(dtype)
        return silu(self.time_mlp_out(silu(self.time_mlp_in(times))))

    def _run_expert(self, prefix: Prefix, hidden: Tensor, condition: Tensor | None) -> Tensor:
        num_rows, num_new = hidden.shape[:2]
        hidden = hidden.to(linear_dtype(self.expert.layers))
        new = torch.arange(num_new, device=hidden.device)
        # without a state token the chunk is one block; with one, that token does not see the actions
        blocks = (new > 0).long() if self.size.kind == "pi0" else torch.zeros_like(new)
        among_new = (blocks[None, :] <= blocks[:, None]).expand(num_rows, -1, -1)
        before = prefix.mask[:, None].expand(-1, num_new, -1)
        positions = prefix.mask.long().sum(1, keepdim=True) + new
        tables = rotary_tables(positions, self.size.expert.head_size, hidden.dtype)
        visible = torch.cat([before, among_new], dim=2)
        context = LayerContext(*tables, visible[:, None], condition)
        hidden, _, _ = run_layers(self.expert.layers, hidden, context, (prefix.keys, prefix.values))
        return apply_norm(self.expert.norm, hidden, condition)[0]

    def materialise_buffers(self, device: torch.device) -> None:
        """Compute the constants that no folder holds, for a network built on the meta device."""
        trunk = self.paligemma.language_model
        scale = torch.tensor(self.size.text.width**0.5, device=device)
        trunk.embed_tokens.embed_scale = nn.Buffer(scale, persistent=False)
        indices = torch.arange(self.size.vision.num_tokens, device=device)[None]
        self.paligemma.vision_tower.embeddings.position_ids = nn.Buffer(indices, persistent=False)


def build_paligemma(size: PiSize) -> Any:
    """Build transformers' PaliGemma, without a language head, on `PiLayer`s."""
    text, vision = size.text.make_config(size.vocabulary), size.vision
    config = PaliGemmaConfig(
        text_config=text.to_dict(),
        vision_config=SiglipVisionConfig(
            hidden_size=vision.width,
            intermediate_size=vision.mlp_width,
            num_hidden_layers=vision.depth,
            num_attention_heads=vision.num_heads,
            patch_size=vision.patch,
            image_size=vision.image_size,
            projection_dim=size.text.width,
            vision_use_head=False,
        ).to_dict(),
        projection_dim=size.text.width,
    )
    model: Any = PaliGemmaModel(config)
    trunk = model.language_model
    trunk.layers = nn.ModuleList(
        PiLayer(text, index, is_adaptive=False) for index in range(size.text.depth)
    )
    # positions are `rotary_tables`', which a cast does not round
    del trunk.rotary_emb
    return model
