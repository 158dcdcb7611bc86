"""Interfaces of policies: the methods that engines and learners need from any policy family.

`TokenModel` is enough for a learner, a critic and a reference; `PolicyModel` also acts; `LanguageModel`
also generates text.

    observations ─► prepare ─► batch ─► sample ──► tokens, log_probs ─► decode ─► actions     (acting)
                       ┌─────────────────────┴──► drawn, what else the log-probs depend on
    observations ──────┴─► prepare ─► batch ──► log_probs, entropy of given tokens            (learning)
                                  └───► features ─► a critic's value head                     (criticising)
    demonstrated actions ─► encode ─► tokens                                                  (imitating)
    messages, tools ─► render ─► prompt tokens ─► extend ─► logits of the next token ─► ... ─► parse ─► Message

`prepare`, `encode`, `decode` and the chat interface run in any thread, at the same time as the device lane:
`prepare` may leave its batch on the device and compute there (OpenVLA's resizes frames on the GPU), but
does not touch the weights. `sample`, `log_probs`, `features`, `extend` and `KeyValues` run on the lane.
A policy family is one class with these methods; `vla_rl/models/openvla_oft/policy.py` is a good example,
and `vla_rl/models/language` implements `LanguageModel` for models that transformers loads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
from torch import Tensor, nn

from vla_rl.engines.chat_interface import ChatInterface, ImageChatInterface, ImagePrompt
from vla_rl.types import Observation, Sampling
from vla_rl.util.arrays import find_not_finite

BatchT = TypeVar("BatchT")

NO_TOKEN: Final = -1
"""Token id that fills rows shorter than the longest row of their batch."""


@dataclass(frozen=True)
class SampledTokens:
    """The choices of a batch of B decisions, on the network's device.

    Example:
        Two decisions of three tokens, from a policy whose log-probs depend on nothing else:

        SampledTokens(tokens=torch.tensor([[5, 0, 9], [4, 0, 9]]), log_probs=...)  # float32 [2, 3]
    """

    tokens: Tensor
    """int64 [B, T] ids, or float32 [B, T] numbers."""

    log_probs: Tensor
    """float32 [B, T], natural log of each token's probability, or density, after temperature."""

    drawn: Mapping[str, Tensor] = field(default_factory=dict)
    """Arrays [B, ...] by name that the log-probs depend on too. `prepare` gets a decision's own as
    `observation["drawn"]`, a dict of arrays, when it is scored, and no such key when it is made."""

    chunk: Tensor | None = None
    """Input of `decode`, [B, ...]; None: the tokens. A flow's tokens are a state on the way, and this is
    its end."""


class Predictions(NamedTuple):
    """A flow policy's predictions at the states of B stored decisions, and the log-probs of these.

    Predictions are linear in the velocity, so two of them say what a third would be.
    """

    log_probs: Tensor
    """float32 [B, T], as `log_probs` computes them."""

    entropy: Tensor
    """float32 [B, T]."""

    prediction: Tensor
    """float32 [B, T] with a gradient: the mean of the next state, or the actions at the end."""

    behavior_prediction: Tensor
    """float32 [B, T], the same under the weights that acted, from what the decision has drawn."""

    reached: Tensor
    """float32 [B, T], what was predicted: the tokens, or the decision's actions as the network sees them."""

    step_std: Tensor
    """float32 [B, 1], standard deviation of the stochastic step; 0 without noise."""

    velocity_weight: Tensor
    """float32 [B, 1], derivative of the prediction by the velocity."""

    behavior_velocity: Tensor
    """float32 [B, T], the velocity under the weights that acted, as the decision has stored it."""


class TokenModel(Protocol[BatchT]):
    """A network that chooses tokens for an observation; the number of tokens depends on the family.

    Invariant: the logits of a row depend only on its own observation, its own earlier tokens and
    the weights, up to float rounding. They do not depend on other rows, the number of rows or
    padding, and there is no dropout, so that acting and learning agree.
    """

    @property
    def network(self) -> nn.Module:
        """The module with the parameters that are trained, and copied from version to version."""
        ...

    @property
    def feature_size(self) -> int:
        """Width of one row of `features`."""
        ...

    def copy(self) -> Self:
        """Return the same policy with its own weights.

        For a reference, a critic's trunk, or an engine that acts while this one learns.
        """
        ...

    def prepare(self, observations: Sequence[Observation]) -> BatchT:
        """Turn observations into a batch, on the CPU or on the network's device.

        Raises: ValueError for unsuitable observations.
        """
        ...

    def log_probs(
        self, batch: BatchT, tokens: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probs and entropies of tokens, float32 [B, T] with a gradient.

        `tokens` are int64 [B, T], `temperatures` [B].

        Rows shorter than the longest are filled with `NO_TOKEN`; the results there are undefined.
        Both are on the network's device, but for a `LanguageModel` on the host.
        """
        ...

    def features(self, batch: BatchT) -> Tensor:
        """Compute each observation's features: float [B, feature_size] with a gradient.

        The policy chooses from them.
        """
        ...

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Convert action chunks [B, H, D], in the environment's units, to tokens int64 [B, T]."""
        ...

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return every parameter under the name that the family's checkpoint files use.

        Views, not copies.
        """
        ...

    def checkpoint_files(self) -> Mapping[str, bytes]:
        """Return the small files that complete a checkpoint, such as `config.json`, by name."""
        ...

    def load_checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into the network.

        Raises: CheckpointError listing missing, unknown and misshapen names.
        """
        ...


def missing_methods(model: object, protocol: type) -> list[str]:
    """Return the methods of a policy that an object lacks, to report them at the start.

    They are those of `TokenModel`, `PolicyModel` or `LanguageModel`.
    """
    return [name for name in dir(protocol) if not name.startswith("_") and not hasattr(model, name)]


def unfit_for_learning(model: TokenModel[Any]) -> str | None:
    """Return why acting and learning would disagree, or checkpoints would be useless.

    None if no reason is found.
    """
    for name, module in model.network.named_modules():
        # Looked for before training: with dropout the learner's log-probs differ from the engine's
        # at random, which an importance ratio takes for a change of the policy.
        is_random = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0.0
        if module.training and (is_random or isinstance(module, nn.modules.batchnorm._BatchNorm)):
            return (
                f"{type(module).__name__} {name!r} in training mode, so a row depends on chance or "
                "on other rows; call network.eval(), or remove the layer"
            )
    tensors = model.checkpoint_tensors()
    not_finite = find_not_finite(tensors)
    if not_finite is not None:
        return f"numbers that are not finite in {not_finite}; load weights that are whole"
    # More is allowed, as with tied weights that are listed twice; less would lose what was trained.
    held = sum(tensor.numel() for tensor in tensors.values())
    needed = sum(parameter.numel() for parameter in model.network.parameters())
    if held < needed:
        return (
            f"{needed} parameters, of which checkpoint_tensors gives {held}: a checkpoint "
            "would not bring it back"
        )
    return None


class PolicyModel(TokenModel[BatchT], Protocol[BatchT]):
    """A policy over T discrete tokens per decision.

    T depends on the family and is the same in every call. A family may have more attributes:

        token_ids             range of its tokens; an agent that hands over another one is reported with
                              its episode
        check_drawn           called with `ActionChunk.drawn` of each decision before it is scored; raises
                              ValueError for what is missing or impossible
        has_token_means       True if its tokens are numbers in order and all chosen at once, so that
                              `Sampling.by_mean` takes their means; a policy without it refuses that
        has_likelihood        False if it chooses without noise, so that log-probs say nothing
        predict               called with a batch, tokens, temperatures and "next_state" or "actions";
                              returns `Predictions`, for losses of flow policies and the exact KL
        has_frozen_prefix     whether what it computes from observations alone is not trained; if so, a learner
                              calls `keep_prefixes` with a number of bytes at its start, and `drop_prefixes`
                              at the end of each update
        follows_plans         True if it continues the plan of a moving robot, which an observation may have
                              (`vla_rl.types.with_plan`)
        example_observation   called with a seed; returns an observation that it can act on and score,
                              `drawn` included, for estimates of a run's memory
        example_tokens        returns tokens of one decision, [1, T], if `encode` cannot make any
    """

    def sample(self, batch: BatchT, samplings: Sequence[Sampling]) -> SampledTokens:
        """Choose tokens [B, T] and compute their log-probs, each row by its own `Sampling`."""
        ...

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Convert tokens [B, T], or `SampledTokens.chunk`, to action chunks float32 [B, H, D].

        Actions are in the environment's units.
        """
        ...


class KeyValues(Protocol):
    """Attention keys and values of several conversations, one slot each."""

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of one slot to another slot."""
        ...

    def swap(self, first: int, second: int) -> None:
        """Exchange two slots."""
        ...


@runtime_checkable
class LanguageModel(TokenModel[BatchT], ChatInterface, Protocol[BatchT]):
    """A policy whose decisions are whole replies, of any length.

    Observations hold `prompt_tokens`, int64 [P], and `grammars`, one (start, stop, grammar) for
    each part of the reply that was sampled under a grammar.
    """

    @property
    def context_size(self) -> int:
        """Maximum number of tokens of a prompt and its reply together."""
        ...

    def key_values(self, num_slots: int) -> KeyValues:
        """Allocate memory for `num_slots` conversations; it grows with the longest of them."""
        ...

    def extend(
        self,
        memory: Any,
        slots: Sequence[int],
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
    ) -> Tensor:
        """Read more tokens of some conversations.

        Row i's `tokens` follow the `starts[i]` tokens that slot `slots[i]` holds.

        Args:
            memory: returned by `key_values`.
            slots: slot of each row; no slot twice.
            starts: number of tokens that each slot already holds.
            tokens: tokens to read, at least one per row.

        Returns: logits of the token after each row's last, float32 [B, V], without gradient.
        """
        ...


class ImageLanguageModel(LanguageModel[BatchT], ImageChatInterface, Protocol[BatchT]):
    """A language model that reads images too."""

    def extend(
        self,
        memory: Any,
        slots: Sequence[int],
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
        image_prompts: Sequence[ImagePrompt | None] = (),
    ) -> Tensor:
        """Read more tokens of some conversations, as `LanguageModel.extend` does.

        Args:
            memory, slots, starts, tokens: as there.
            image_prompts: for each row its prompt with images, or None; empty if no row has any.
        """
        ...
