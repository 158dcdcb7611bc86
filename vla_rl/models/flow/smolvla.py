"""SmolVLA: a small vision-language model whose layers an expert for actions attends to.

    images ─► vision tower ─► times √width ┐
    prompt ─► embedding    ─► times √width ├─► text layers ─► keys and values of each layer
    state  ─► state_proj                   ┘                        │
                                                                    ▼
    noised chunk, time ─► action_time_mlp ─► expert layers: self-attention over prefix and chunk, every
                                             second one cross-attention to the prefix alone ─► velocity

Shukor et al. 2025, "SmolVLA: A Vision-Language-Action Model for Affordable and Efficient Robotics",
arXiv:2506.01844. It differs from pi0 in five ways: image embeddings are multiplied by √width; the
state is a token of the prefix, as wide as the text's; tokens of actions see only earlier tokens of
actions; layers of the expert alternate between self- and cross-attention; and rotary positions have a
wavelength of their own. The vision tower, the text layers and the names of all parameters are those
of transformers' SmolVLM.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
)
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMConfig
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMModel

from vla_rl.errors import ConfigError
from vla_rl.models.attention import use_given_masks
from vla_rl.models.flow.network import FlowInputs, Prefix, embed_time
from vla_rl.models.prismatic.trunk import ExactRotary
from vla_rl.types import Config, NonNegativeInt, PositiveFloat, PositiveInt

WAVELENGTH: Final = 10_000.0
"""Longest wavelength of the rotary positions, whatever the language model was trained with."""

MLP_MULTIPLE: Final = 256
"""The expert's hidden width is rounded up to a multiple of this."""

Rotary: TypeAlias = tuple[Tensor, Tensor]


class SmolVlaConfig(Config, frozen=True, kw_only=True):
    """Sizes of a SmolVLA, under LeRobot's names for them."""

    vlm: dict[str, Any]
    """The `config.json` of the SmolVLM; its `text_config` counts the layers before they are cut."""

    chunk_size: PositiveInt = 50
    max_state_dim: PositiveInt = 32
    max_action_dim: PositiveInt = 32
    num_vlm_layers: int = 16
    """Text layers that are kept, from the first on; 0 or less keeps all."""

    num_expert_layers: int = -1
    """Layers of the expert; 0 or less: as many as the text has."""

    attention_mode: Literal["cross_attn", "self_attn"] = "cross_attn"
    self_attn_every_n_layers: int = 2
    """In mode cross_attn, every such layer has self-attention; 0 or less: none has."""

    expert_width_multiplier: PositiveFloat = 0.75
    add_image_special_tokens: bool = False
    """Whether two tokens are put before each image, and one after it."""

    image_tokens: tuple[NonNegativeInt, NonNegativeInt] = (0, 0)
    """Ids of the tokenizer's `<fake_token_around_image>` and `<global-img>`."""

    prefix_length: int = -1
    """Tokens up to which a shorter prefix is padded."""

    min_period: PositiveFloat = 4e-3
    max_period: PositiveFloat = 4.0


class SmolVlaNetwork(nn.Module):
    """SmolVLA's network, with random weights until a checkpoint's are loaded.

    Raises: ConfigError naming a setting for which no such network exists.
    """

    def __init__(self, config: SmolVlaConfig) -> None:
        super().__init__()
        self.config = config
        vlm = _cut_text_layers(config)
        text = vlm.text_config
        self.vlm_with_expert = VlmWithExpert(config, vlm)
        width = self.vlm_with_expert.lm_expert.width
        self.state_proj = nn.Linear(config.max_state_dim, text.hidden_size)
        self.action_in_proj = nn.Linear(config.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, config.max_action_dim)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)

    @property
    def horizon(self) -> int:
        """Rows of a chunk, H."""
        return self.config.chunk_size

    @property
    def action_dim(self) -> int:
        """Width of a padded action, P."""
        return self.config.max_action_dim

    @property
    def feature_size(self) -> int:
        """Width of the language model."""
        return self.state_proj.out_features

    def prefix_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the vision-language model and of the state's token."""
        return [*self.vlm_with_expert.vlm.parameters(), *self.state_proj.parameters()]

    def embed_prefix(self, inputs: FlowInputs) -> Prefix:
        """Compute what depends on the B observations alone: images, prompt, state."""
        embeddings, mask = self.embed_tokens(inputs)
        # a token sees its own block and those before it, and the state is the only later block:
        # images and prompt are a block without it
        block = torch.zeros_like(mask, dtype=torch.int64)
        block[:, self._state_position(inputs) :] = 1
        visible = (block[:, None, :] <= block[:, :, None]) & mask[:, None, :] & mask[:, :, None]
        positions = mask.cumsum(1) - 1
        cache = DynamicCache()
        output = self.vlm_with_expert.text_model(
            inputs_embeds=embeddings,
            attention_mask=_additive(visible, embeddings.dtype)[:, None],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        layers: list[Any] = cache.layers
        keys = tuple(layer.keys for layer in layers)
        values = tuple(layer.values for layer in layers)
        return Prefix(keys, values, mask, positions, output, inputs.state)

    def embed_tokens(self, inputs: FlowInputs) -> tuple[Tensor, Tensor]:
        """Return the prefix's tokens [B, L, width] before the first layer, and their mask [B, L]."""
        vlm, num_rows = self.vlm_with_expert, len(inputs.images)
        images = vlm.embed_images(inputs.images)  # [B, C, tokens, width]
        scale = images.shape[-1] ** 0.5
        parts: list[Tensor] = []
        masks: list[Tensor] = []

        def add(tokens: Tensor, mask: Tensor | None = None) -> None:
            shape = num_rows, tokens.shape[-2]
            tokens = tokens.expand(*shape, tokens.shape[-1])
            parts.append(tokens)
            masks.append(
                torch.ones_like(tokens[..., 0], dtype=torch.bool) if mask is None else mask
            )

        fake, whole = self.config.image_tokens
        for camera in range(images.shape[1]):
            if self.config.add_image_special_tokens:
                add(vlm.embed_text(inputs.tokens.new_tensor([fake, whole])))
            present = inputs.image_mask[:, camera, None].expand(-1, images.shape[2])
            add(images[:, camera] * scale, present)
            if self.config.add_image_special_tokens:
                add(vlm.embed_text(inputs.tokens.new_tensor([fake])))
        add(vlm.embed_text(inputs.tokens) * scale, inputs.token_mask)
        state = self.state_proj(inputs.state.to(self.state_proj.weight.dtype))
        add(state[:, None].to(images.dtype))
        embeddings, mask = torch.cat(parts, 1), torch.cat(masks, 1)
        missing = max(0, self.config.prefix_length - mask.shape[1])
        return (
            functional.pad(embeddings, (0, 0, 0, missing)),
            functional.pad(mask, (0, missing), value=False),
        )

    def velocity(self, prefix: Prefix, x: Tensor, time: Tensor) -> Tensor:
        """Predict noise - actions, float32 [N, H, P], as `FlowNetwork.velocity` does."""
        actions = self.action_in_proj(x.to(self.action_in_proj.weight.dtype))
        embedded = embed_time(
            time, actions.shape[-1], self.config.min_period, self.config.max_period
        )
        embedded = embedded.to(actions.dtype)[:, None].expand_as(actions)
        mixed = self.action_time_mlp_in(torch.cat([actions, embedded], -1))
        tokens = self.action_time_mlp_out(functional.silu(mixed))
        hidden = self.vlm_with_expert.lm_expert(tokens, prefix)
        found: Tensor = self.action_out_proj(hidden.to(self.action_out_proj.weight.dtype))
        return found.float()

    def features(self, prefix: Prefix) -> Tensor:
        """Return the mean of the prefix's unmasked outputs, [B, feature_size]."""
        mask = prefix.mask[..., None].to(prefix.output.dtype)
        return (prefix.output * mask).sum(1) / mask.sum(1)

    def _state_position(self, inputs: FlowInputs) -> int:
        """Return the position of the state's token, which is the last of those that are not padding."""
        num_images = inputs.images.shape[1]
        marks = 3 if self.config.add_image_special_tokens else 0
        each = self.vlm_with_expert.count_image_tokens(inputs.images.shape[-1]) + marks
        return num_images * each + inputs.tokens.shape[1]


class VlmWithExpert(nn.Module):
    """The vision-language model beside the expert, under LeRobot's names."""

    def __init__(self, config: SmolVlaConfig, vlm: SmolVLMConfig) -> None:
        super().__init__()
        self.vlm = nn.Module()
        self.vlm.model = SmolVLMModel(vlm)
        use_given_masks(self.text_model)
        self.text_model.rotary_emb = ExactRotary(vlm.text_config, rounds_to_bfloat16=False)
        self.lm_expert = Expert(config, vlm.text_config)

    @property
    def text_model(self) -> Any:
        """transformers' language model."""
        model: Any = self.vlm.model
        return model.text_model

    def embed_images(self, images: Tensor) -> Tensor:
        """Return the tokens of images [B, C, 3, S, S] in [-1, 1]: [B, C, tokens, width]."""
        model: Any = self.vlm.model
        flat = images.flatten(0, 1).to(model.vision_model.dtype)
        tokens = model.connector(model.vision_model(pixel_values=flat).last_hidden_state)
        whole: Tensor = tokens.unflatten(0, images.shape[:2])
        return whole

    def count_image_tokens(self, image_size: int) -> int:
        """Return the number of tokens of an image of this width and height."""
        model: Any = self.vlm.model
        side = image_size // model.vision_model.patch_size
        return int(side**2 // model.connector.scale_factor**2)

    def embed_text(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of token ids."""
        found: Tensor = self.text_model.embed_tokens(tokens)
        return found


class Expert(nn.Module):
    """The layers that compute a chunk's tokens from a prefix."""

    def __init__(self, config: SmolVlaConfig, text: Any) -> None:
        super().__init__()
        self.config = config
        self.width = int(text.hidden_size * config.expert_width_multiplier)
        num_layers = config.num_expert_layers
        if num_layers <= 0:
            num_layers = text.num_hidden_layers
        self.every = _spread_layers(config, text.num_hidden_layers, num_layers)
        self.layers = nn.ModuleList(
            ExpertLayer(text, self.width, has_self_attention=_has_self_attention(config, number))
            for number in range(num_layers)
        )
        self.norm = LlamaRMSNorm(self.width, eps=text.rms_norm_eps)
        self.rotary = ExactRotary(text, rounds_to_bfloat16=False)

    def forward(self, tokens: Tensor, prefix: Prefix) -> Tensor:
        """Return the outputs [N, H, width] of a chunk's tokens."""
        num_rows, horizon = tokens.shape[:2]
        order = torch.arange(horizon, device=tokens.device).expand(num_rows, -1)
        rotary = self.rotary(tokens, prefix.mask.sum(1, keepdim=True) + order)
        # queries of cross-attention count from 0: the keys lost their positions in a projection
        rotary_alone = self.rotary(tokens, order)
        seen = prefix.mask[:, None].expand(-1, horizon, -1)
        earlier = (order[:, None, :] <= order[:, :, None]).expand(num_rows, -1, -1)
        both = _additive(torch.cat([seen, earlier], -1), tokens.dtype)[:, None]
        alone = both[..., : seen.shape[-1]]
        for number, layer in enumerate(self.layers):
            keys = prefix.keys[number * self.every]
            values = prefix.values[number * self.every]
            if _has_self_attention(self.config, number):
                tokens = layer(tokens, keys, values, rotary, both)
            else:
                tokens = layer(tokens, keys, values, rotary_alone, alone)
        found: Tensor = self.norm(tokens)
        return found


class ExpertLayer(nn.Module):
    """A Llama layer that attends to a prefix."""

    def __init__(self, text: Any, width: int, *, has_self_attention: bool) -> None:
        super().__init__()
        self.self_attn = ExpertAttention(text, width, has_self_attention=has_self_attention)
        make_mlp: Any = LlamaMLP  # untyped
        self.mlp = make_mlp(_narrow_config(text, width))
        self.input_layernorm = LlamaRMSNorm(width, eps=text.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps=text.rms_norm_eps)

    def forward(
        self, tokens: Tensor, keys: Tensor, values: Tensor, rotary: Rotary, mask: Tensor
    ) -> Tensor:
        """Return the tokens [N, H, width] after this layer."""
        tokens = tokens + self.self_attn(self.input_layernorm(tokens), keys, values, rotary, mask)
        found: Tensor = tokens + self.mlp(self.post_attention_layernorm(tokens))
        return found


class ExpertAttention(nn.Module):
    """Attention to a prefix, and with `has_self_attention` to the chunk's own tokens too."""

    def __init__(self, text: Any, width: int, *, has_self_attention: bool) -> None:
        super().__init__()
        self.has_self_attention, self.head_dim = has_self_attention, text.head_dim
        queries = text.num_attention_heads * text.head_dim
        stored = text.num_key_value_heads * text.head_dim
        # cross-attention projects the prefix's keys once more, which are as wide as the text's
        source = width if has_self_attention else stored
        has_bias = text.attention_bias
        self.q_proj = nn.Linear(width, queries, bias=has_bias)
        self.k_proj = nn.Linear(source, stored, bias=has_bias)
        self.v_proj = nn.Linear(source, stored, bias=has_bias)
        self.o_proj = nn.Linear(queries, width, bias=has_bias)

    def forward(
        self, tokens: Tensor, keys: Tensor, values: Tensor, rotary: Rotary, mask: Tensor
    ) -> Tensor:
        """Attend from normalised tokens [N, H, width] under a mask [N, 1, H, K] that is added."""
        dtype = self.q_proj.weight.dtype
        tokens, keys, values = tokens.to(dtype), keys.to(dtype), values.to(dtype)
        query = self._split(self.q_proj(tokens))
        if self.has_self_attention:
            query, own = apply_rotary_pos_emb(query, self._split(self.k_proj(tokens)), *rotary)
            keys = torch.cat([keys, own], 2)
            values = torch.cat([values, self._split(self.v_proj(tokens))], 2)
        else:
            query, _ = apply_rotary_pos_emb(query, query, *rotary)
            keys = self._split(self.k_proj(keys.transpose(1, 2).flatten(2)))
            values = self._split(self.v_proj(values.transpose(1, 2).flatten(2)))
        found = functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask.to(dtype), enable_gqa=True
        )
        projected: Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return projected

    def _split(self, numbers: Tensor) -> Tensor:
        """Return [N, heads, L, head size] of [N, L, heads * head size]."""
        return numbers.view(*numbers.shape[:2], -1, self.head_dim).transpose(1, 2)


def _cut_text_layers(config: SmolVlaConfig) -> SmolVLMConfig:
    """Return the language model's configuration with the layers and the rotary positions of SmolVLA."""
    settings: Mapping[str, Any] = config.vlm
    text: dict[str, Any] = {**settings["text_config"]}
    # both names of the setting, so that neither of a newer and an older file is left
    text.pop("rope_theta", None)
    text.pop("rope_scaling", None)
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": WAVELENGTH}
    if config.num_vlm_layers > 0:
        held = text["num_hidden_layers"]
        text["num_hidden_layers"] = min(config.num_vlm_layers, held)
    return SmolVLMConfig.from_dict({**settings, "text_config": text})


def _narrow_config(text: Any, width: int) -> LlamaConfig:
    """Return the configuration of the expert's MLP."""
    hidden = 4 * int(2 * width / 3)
    hidden = -(-hidden // MLP_MULTIPLE) * MLP_MULTIPLE
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=hidden,
        num_attention_heads=1,
        hidden_act=text.hidden_act,
        mlp_bias=text.mlp_bias,
    )


def _has_self_attention(config: SmolVlaConfig, number: int) -> bool:
    every = config.self_attn_every_n_layers
    return config.attention_mode == "self_attn" or (every > 0 and number % every == 0)


def _spread_layers(config: SmolVlaConfig, num_text: int, num_expert: int) -> int:
    """Return how many text layers there are to a layer of the expert.

    Raises: ConfigError if they do not divide, or layers would be built for one kind of attention and
        used for the other.
    """
    if num_text % num_expert:
        raise ConfigError(
            f"num_expert_layers is {num_expert}, but the text has {num_text} layers "
            "(num_vlm_layers), expected a divisor of them"
        )
    every = num_text // num_expert
    for number in range(num_expert):
        if _has_self_attention(config, number) != _has_self_attention(config, number * every):
            raise ConfigError(
                f"num_expert_layers is {num_expert}, below the {num_text} of the text, with "
                f"self_attn_every_n_layers {config.self_attn_every_n_layers}: layer {number} of "
                f"the expert stands beside layer {number * every} of the text, which has the other "
                "kind of attention; set num_expert_layers to -1, or self_attn_every_n_layers to -1"
            )
    return every


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to scores; the lowest number instead of -inf, so that a padded row that sees
    nothing is a mean and not NaN."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)
