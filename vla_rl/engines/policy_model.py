"""What an engine and a learner need of any policy family, and nothing else about it.

`TokenModel` is what a learner, a critic and a reference need; `PolicyModel` also acts; `LanguageModel`
(`language_model.py`) also speaks.

    observations ─► prepare ─► batch ─► sample ──► tokens, log_probs ─► decode ─► actions     (acting)
                                  ├───► log_probs, entropy of given tokens                    (learning)
                                  └───► features ─► a critic's value head                     (judging)
    demonstrated actions ─► encode ─► tokens                                                  (imitating)

`prepare`, `encode` and `decode` run in any thread, beside the device lane: `prepare` may leave its batch on the device and
compute there (OpenVLA's resizes frames on the GPU), but touches no weights. `sample`, `log_probs` and `features` run on the
lane.
A family writes one class with these methods; `vla_rl/models/openvla_oft/policy.py` is the one to read.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, Self, TypeVar

import numpy as np
from torch import Tensor, nn

from vla_rl.types import Observation, Sampling

BatchT = TypeVar("BatchT")

NO_TOKEN: Final = -1
"""Stands beyond the end of a row that is shorter than others of its batch."""


class TokenModel(Protocol[BatchT]):
    """A network that chooses tokens after an observation, as many as its family does.

    Invariant: the logits of a row depend on its own observation, its own tokens before and the weights only, up to float
    rounding: neither on the other rows of the batch nor on their number, nor on padding. There is no dropout: acting and
    learning agree.
    """

    @property
    def network(self) -> nn.Module:
        """Holds the parameters; what the learner optimises and what is copied from version to version."""
        ...

    @property
    def feature_size(self) -> int:
        """Numbers in one row of `features`."""
        ...

    def copy(self) -> Self:
        """The same policy with weights of its own: a reference, a critic's trunk, or one that acts while this one learns."""
        ...

    def prepare(self, observations: Sequence[Observation]) -> BatchT:
        """Turn observations into a batch, on the CPU or where the network is. Raises: ValueError for what does not fit."""
        ...

    def log_probs(self, batch: BatchT, tokens: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, float32 [B, T] with a gradient, of `tokens` int64 [B, T] at `temperatures` [B].

        Beyond the end of a row that is shorter than others stands `NO_TOKEN`, and there the results are anything.
        """
        ...

    def features(self, batch: BatchT) -> Tensor:
        """What the policy makes of each observation before it chooses, float [B, feature_size] with a gradient."""
        ...

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Action chunks [B, H, D], in the environment's units, to tokens int64 [B, T]."""
        ...

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Every parameter under the name that the family's files give it; views, not copies."""
        ...

    def checkpoint_files(self) -> Mapping[str, bytes]:
        """Small files beside the tensors that make a checkpoint whole, such as `config.json`."""
        ...

    def load_checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into the network. Raises: CheckpointError listing missing, unknown and misshapen names."""
        ...


def missing_methods(model: object, protocol: type) -> list[str]:
    """Which methods of `TokenModel`, `PolicyModel` or `LanguageModel` an object lacks: its errors would come late."""
    return [name for name in dir(protocol) if not name.startswith("_") and not hasattr(model, name)]


def unfit_for_learning(model: TokenModel[Any]) -> str | None:
    """What would make a policy's acting and learning disagree, or its checkpoints useless, in words; None where nothing is
    seen that would."""
    for name, module in model.network.named_modules():
        is_random = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0.0
        if module.training and (is_random or isinstance(module, nn.modules.batchnorm._BatchNorm)):
            return (
                f"{type(module).__name__} {name!r} in training mode, by which a row depends on chance or on the rows beside "
                "it; call network.eval(), or take layers without"
            )
    held = sum(tensor.numel() for tensor in model.checkpoint_tensors().values())
    needed = sum(parameter.numel() for parameter in model.network.parameters())
    if held < needed:
        return f"{needed} parameters, of which checkpoint_tensors gives {held}: a checkpoint would not bring it back"
    return None


class PolicyModel(TokenModel[BatchT], Protocol[BatchT]):
    """A policy over T discrete tokens per decision. T may differ from family to family, not from call to call."""

    def sample(self, batch: BatchT, samplings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
        """Choose the tokens of every row by its own `Sampling`: int64 [B, T], and their float32 [B, T] log-probs."""
        ...

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens int64 [B, T] to action chunks float32 [B, H, D], in the environment's units."""
        ...
