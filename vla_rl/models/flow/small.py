"""Small flow network that trains on a CPU: convolutions cut patches, a ViT reads, an expert moves the actions.

    image of each camera ─► two convolutions ─► patches ─┐
    instruction ─► hashed words ─────────────────────────┼─► ViT ─► keys, values of each layer ─┐  once
    state ─► one token ──────────────────────────────────┘                                      │
    noised actions [H, P] ─► expert: attention to both, norms that follow the time ─────────────┴─► velocity

Layer l of the expert attends to the keys and values of the ViT's layer l and to its own tokens, as in
pi0 (Black et al. 2024, arXiv:2410.24164). Its norms are adaptive with a gate that begins at 0 (DiT:
Peebles & Xie 2023, arXiv:2212.09748), so a new network predicts the velocity 0. A word is the sum of two
rows of tables chosen by a hash (Svenstrup et al. 2017, arXiv:1709.03933): no vocabulary is needed.
"""

from typing import Annotated, Final

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_rl.models.flow.network import FlowInputs, Prefix, embed_time
from vla_rl.models.prismatic.action_tokens import ActionBounds
from vla_rl.types import Config, PositiveInt

STRIDE: Final = 4
"""Pixels that the first convolution takes together, along each side."""

NUM_HASHES: Final = 512
"""Rows of each of the two tables of words; ids are below their product."""

MAX_WORDS: Final = 32
"""Longest instruction, in words."""

TIME_PERIODS: Final = (4e-3, 4.0)
"""Shortest and longest period of the embedding of the time, as in openpi."""


class StateConfig(Config, frozen=True, kw_only=True):
    """Statistics of the robot's state, `observation["state"]`, which becomes one token.

    Example:
        StateConfig(mean=(0.1, 0.0), std=(0.3, 0.3))
    """

    mean: Annotated[tuple[float, ...], msgspec.Meta(min_length=1)]
    """Mean of the training data, for each dimension."""

    std: tuple[float, ...]
    """Standard deviation of the training data, for each dimension, above 0."""

    def __post_init__(self) -> None:
        fits = len(self.std) == len(self.mean) and min(self.std) > 0.0
        self.require(fits, "std", f"{len(self.mean)} numbers above 0, as many as mean has")


class SmallFlowConfig(Config, frozen=True, kw_only=True):
    """Inputs, outputs and sizes of a small flow policy. The defaults have 1.4 million parameters.

    Example:
        SmallFlowConfig(actions=unit_bounds(2), cameras=("image",), image_size=32)  # the reaching task
    """

    actions: ActionBounds
    """Statistics of the actions, which fix the robot's dimensions."""

    state: StateConfig | None = None
    """Statistics of the state; none if the policy does not use it."""

    cameras: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("image",)
    """Observation keys of the images, uint8 [S, S, 3]."""

    optional_cameras: tuple[str, ...] = ()
    """Those of the cameras that an observation may lack."""

    image_size: PositiveInt = 32
    """Pixels along each side of an image."""

    patch_size: PositiveInt = 8
    """Pixels along each side of a patch, a multiple of 4 that divides the image."""

    horizon: PositiveInt = 4
    """Control steps of a chunk, H."""

    padded_dim: PositiveInt | None = None
    """Width of an action inside of the network, P; none for the robot's own."""

    depth: PositiveInt = 3
    """Layers of the ViT, and as many of the expert."""

    num_heads: PositiveInt = 4
    """Attention heads of both."""

    width: PositiveInt = 128
    """Width of the ViT, a multiple of the heads."""

    expert_width: Annotated[int, msgspec.Meta(ge=2, multiple_of=2)] = 96
    """Width of the expert."""

    def __post_init__(self) -> None:
        unique = len(set(self.cameras)) == len(self.cameras)
        self.require(unique, "cameras", "each name once")
        known = set(self.optional_cameras) <= set(self.cameras)
        self.require(known, "optional_cameras", f"some of cameras, {self.cameras}")
        cut = self.patch_size % STRIDE == 0 and self.image_size % self.patch_size == 0
        self.require(
            cut, "patch_size", f"a multiple of {STRIDE} that divides image_size, {self.image_size}"
        )
        self.require(
            self.width % self.num_heads == 0, "width", f"a multiple of num_heads, {self.num_heads}"
        )
        self.require(
            self.action_width >= self.actions.action_dim,
            "padded_dim",
            f"at least the {self.actions.action_dim} dimensions of an action",
        )

    @property
    def action_width(self) -> int:
        """Width of a padded action, P."""
        return self.actions.action_dim if self.padded_dim is None else self.padded_dim

    @property
    def state_size(self) -> int | None:
        """Numbers of the state; None if the policy reads none."""
        return None if self.state is None else len(self.state.mean)


class SmallFlowNetwork(nn.Module):
    """A small `FlowNetwork`, with random weights from torch's global generator."""

    def __init__(self, config: SmallFlowConfig) -> None:
        super().__init__()
        self.config = config
        width, expert = config.width, config.expert_width
        num_patches = (config.image_size // config.patch_size) ** 2
        kernel = config.patch_size // STRIDE
        self.stem = nn.Sequential(
            nn.Conv2d(3, width // 2, STRIDE, stride=STRIDE),
            nn.GELU(),
            nn.Conv2d(width // 2, width, 2 * kernel - 1, stride=kernel, padding=kernel - 1),
        )
        self.patch_positions = _make_table(num_patches, width)
        self.camera_names = _make_table(len(config.cameras), width)
        self.word_hashes = _make_table(2 * NUM_HASHES, width)
        self.word_positions = _make_table(MAX_WORDS, width)
        state = config.state_size
        self.state_in = None if state is None else nn.Linear(state, width)
        self.reader = nn.ModuleList(
            ReaderLayer(width, config.num_heads) for _ in range(config.depth)
        )
        self.reader_norm = nn.LayerNorm(width)
        self.action_in = nn.Linear(config.action_width, expert)
        self.action_positions = _make_table(config.horizon, expert)
        self.time_in = nn.Sequential(
            nn.Linear(expert, expert), nn.SiLU(), nn.Linear(expert, expert)
        )
        self.expert = nn.ModuleList(
            ExpertLayer(expert, width, config.num_heads) for _ in range(config.depth)
        )
        self.expert_norm = AdaptiveNorm(expert, 2)
        self.action_out = nn.Linear(expert, config.action_width)
        nn.init.zeros_(self.action_out.weight)
        nn.init.zeros_(self.action_out.bias)

    @property
    def horizon(self) -> int:
        """Rows of a chunk, H."""
        return self.config.horizon

    @property
    def action_dim(self) -> int:
        """Width of a padded action, P."""
        return self.config.action_width

    @property
    def feature_size(self) -> int:
        """Width of the ViT's and of the expert's part together."""
        return self.config.width + self.config.expert_width

    def prefix_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of stem, tokens and ViT."""
        tables = [
            self.patch_positions,
            self.camera_names,
            self.word_hashes,
            self.word_positions,
        ]
        parts = [self.stem, self.state_in, self.reader, self.reader_norm]
        inside = [each for part in parts if part is not None for each in part.parameters()]
        return [*tables, *inside]

    def embed_prefix(self, inputs: FlowInputs) -> Prefix:
        """Read images, instruction and state once."""
        tokens, mask = self._embed_inputs(inputs)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for layer in self.reader:
            tokens, key, value = layer(tokens, mask)
            keys.append(key)
            values.append(value)
        return Prefix(
            tuple(keys),
            tuple(values),
            mask,
            mask.long().cumsum(1) - 1,
            self.reader_norm(tokens),
            inputs.state,
        )

    def velocity(self, prefix: Prefix, x: Tensor, time: Tensor) -> Tensor:
        """Predict noise - actions, float32 [N, H, P]."""
        velocity: Tensor = self.action_out(self._move(prefix, x, time))
        return velocity.float()

    def features(self, prefix: Prefix) -> Tensor:
        """Return means of the ViT's output, over tokens that are there, and of the expert's hidden
        states at x = 0 and t = 1, which depend on no action, [B, feature_size].
        """
        weights = prefix.mask[..., None].to(prefix.output.dtype)
        read = (prefix.output * weights).sum(1) / weights.sum(1)
        num_rows = len(prefix.mask)
        still = read.new_zeros(num_rows, self.horizon, self.action_dim)
        moved = self._move(prefix, still, read.new_ones(num_rows))
        return torch.cat([read, moved.mean(1)], -1)

    def _move(self, prefix: Prefix, x: Tensor, time: Tensor) -> Tensor:
        """Return the expert's last hidden states, [N, H, expert width]."""
        dtype = self.action_out.weight.dtype
        embedded = embed_time(time, self.config.expert_width, *TIME_PERIODS).to(dtype)
        condition = functional.silu(self.time_in(embedded))
        tokens = self.action_in(x.to(dtype)) + self.action_positions
        own = prefix.mask.new_ones(len(x), self.horizon)
        mask = torch.cat([prefix.mask, own], 1)
        layers = zip(self.expert, prefix.keys, prefix.values, strict=True)
        for layer, key, value in layers:
            tokens = layer(tokens, condition, key, value, mask)
        scale, shift = self.expert_norm(condition)
        return _normalise(tokens, scale, shift)

    def _embed_inputs(self, inputs: FlowInputs) -> tuple[Tensor, Tensor]:
        """Return tokens [B, L, width] and their mask, bool [B, L]."""
        num_rows, num_cameras = inputs.image_mask.shape
        dtype = self.action_out.weight.dtype
        patches = self.stem(inputs.images.flatten(0, 1).to(dtype)).flatten(2).transpose(1, 2)
        patches = patches.unflatten(0, (num_rows, num_cameras))
        patches = patches + self.patch_positions + self.camera_names[:, None]
        # Two independent hashes: two words are the same token only if both collide.
        ids = inputs.tokens
        words = self.word_hashes[ids % NUM_HASHES]
        words = words + self.word_hashes[NUM_HASHES + ids // NUM_HASHES]
        words = words + self.word_positions[: ids.shape[1]]
        parts = [patches.flatten(1, 2), words]
        seen = inputs.image_mask[..., None].expand(-1, -1, patches.shape[2]).flatten(1)
        masks = [seen, inputs.token_mask]
        if self.state_in is not None:
            parts.append(self.state_in(inputs.state.to(dtype))[:, None])
            masks.append(torch.ones_like(seen[:, :1]))
        return torch.cat(parts, 1), torch.cat(masks, 1)


class ReaderLayer(nn.Module):
    """A layer of the ViT: every token sees every token that is there."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = _make_mlp(width)

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return new tokens [B, L, width], and keys and values [B, heads, L, head size]."""
        query, key, value = _split_heads(
            self.query_key_value(self.norm(tokens)), 3, self._num_heads
        )
        tokens = tokens + self.attention_out(_attend(query, key, value, mask))
        return tokens + self.mlp(self.mlp_norm(tokens)), key, value


class ExpertLayer(nn.Module):
    """A layer of the expert: actions see each other and the ViT's layer beside them."""

    def __init__(self, width: int, reader_width: int, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.norm = AdaptiveNorm(width, 6)
        self.query_key_value = nn.Linear(width, 3 * reader_width)
        self.attention_out = nn.Linear(reader_width, width)
        self.mlp = _make_mlp(width)

    def forward(
        self, tokens: Tensor, condition: Tensor, key: Tensor, value: Tensor, mask: Tensor
    ) -> Tensor:
        """Return new tokens [N, H, width].

        Args:
            tokens: [N, H, width].
            condition: [N, width], of the time.
            key, value: the prefix's, [N, heads, L, head size].
            mask: bool [N, L + H].
        """
        scale, shift, gate, mlp_scale, mlp_shift, mlp_gate = self.norm(condition)
        query, own_key, own_value = _split_heads(
            self.query_key_value(_normalise(tokens, scale, shift)), 3, self._num_heads
        )
        seen = _attend(query, torch.cat([key, own_key], 2), torch.cat([value, own_value], 2), mask)
        tokens = tokens + gate * self.attention_out(seen)
        moved: Tensor = tokens + mlp_gate * self.mlp(_normalise(tokens, mlp_scale, mlp_shift))
        return moved


class AdaptiveNorm(nn.Module):
    """Scales, shifts and gates that follow the time; all begin at 0."""

    def __init__(self, width: int, num: int) -> None:
        super().__init__()
        self._num = num
        self.dense = nn.Linear(width, num * width)
        nn.init.zeros_(self.dense.weight)
        nn.init.zeros_(self.dense.bias)

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        """Return `num` tensors [N, 1, width] for a condition [N, width]."""
        parts: tuple[Tensor, ...] = self.dense(condition)[:, None].chunk(self._num, -1)
        return parts


def _normalise(tokens: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return functional.layer_norm(tokens, tokens.shape[-1:]) * (1.0 + scale) + shift


def _make_table(num_rows: int, width: int) -> nn.Parameter:
    return nn.Parameter(0.5 * torch.randn(num_rows, width))


def _make_mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def _split_heads(joined: Tensor, num: int, num_heads: int) -> tuple[Tensor, ...]:
    """Cut [B, L, num * width] into `num` tensors [B, heads, L, head size]."""
    cut = joined.view(*joined.shape[:2], num, num_heads, -1)
    return cut.permute(2, 0, 3, 1, 4).unbind(0)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return attention [B, Q, width] under a mask of keys, bool [B, K]."""
    attended = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask[:, None, None]
    )
    return attended.transpose(1, 2).flatten(2)
