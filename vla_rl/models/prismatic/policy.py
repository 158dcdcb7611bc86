"""Base class of the policies on a Prismatic network: weights, processor, copies, adapters,
checkpoints.

    PrismaticPolicy ─┬─ OpenVla                    one action token after the other
                     └─ OftPolicy ─┬─ OpenVlaOft             a chunk of tokens in one pass
                                   └─ ContinuousOpenVlaOft   a chunk of numbers

A family adds sampling and scoring (`sample`, `log_probs`), the meaning of its tokens (`encode`,
`decode`), and its checkpoint's own files (`checkpoint_files`).
"""

import abc
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, Self, TypeVar

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from vla_rl.engines.cuda_graphs import Compute, CudaRecorder, Record, ReplayedCall, Tensors
from vla_rl.engines.policy_model import PolicyModel
from vla_rl.learner.plan import TensorPlan
from vla_rl.models.blocks import CompiledBlock, compile_blocks, decoder_plan, recompute_in_backward
from vla_rl.models.images import AugmentationConfig
from vla_rl.models.images.pipeline import image_stages, training_pipeline
from vla_rl.models.observed_values import require_dicts
from vla_rl.models.prismatic.action_tokens import ActionScaler, ActionTokenizer
from vla_rl.models.prismatic.adapters import build_with_weights, merged_tensors
from vla_rl.models.prismatic.config import LoraConfig, PrismaticConfig, ProprioConfig
from vla_rl.models.prismatic.folder import PublicFolder
from vla_rl.models.prismatic.network import PrismaticNetwork
from vla_rl.models.prismatic.processor import (
    PrismaticBatch,
    PrismaticProcessor,
    read_tokenizer,
)
from vla_rl.models.prismatic.public_config import (
    CONFIG_FILE,
    EXTENSION_FILE,
    TOKENIZER_FILE,
    Extension,
    encode_json,
    public_config,
    public_name,
    timm_name,
)
from vla_rl.models.prismatic.weights import write_weights
from vla_rl.models.robot_policy import TracedValue
from vla_rl.models.weight_files import check_names
from vla_rl.types import Observation

ConfigT = TypeVar("ConfigT", bound=PrismaticConfig)
NetworkT = TypeVar("NetworkT", bound=PrismaticNetwork)

PROMPT_WIDTH: Final = 16
"""Prompts of replayed calls are padded to a multiple of this width."""


class PrismaticPolicy(PolicyModel[PrismaticBatch], Generic[ConfigT, NetworkT]):
    """A `PolicyModel` on two vision towers, a projector and a Llama.

    Args:
        config: configuration of the network, its inputs and its outputs.
        network: built from `config`; it is put into evaluation mode, because it has no dropout.
        tokenizer: converts prompts to ids.
        origin: folder that it was read from, whose other small files are saved with it; None for
            random weights.
    """

    def __init__(
        self,
        config: ConfigT,
        network: NetworkT,
        tokenizer: Tokenizer,
        origin: PublicFolder | None = None,
    ) -> None:
        self.config = config
        self._network, self._tokenizer, self._origin = network, tokenizer, origin
        network.eval()
        self.recomputes_activations = False
        self._record: Record | None = None
        self._replayed: dict[str, ReplayedCall] = {}
        self._processor = PrismaticProcessor(config, tokenizer, self._proprio)

    @classmethod
    def create(cls, config: ConfigT, seed: int) -> Self:
        """Create a policy with random weights from `seed`.

        The global random state is left unchanged.
        """
        tokenizer = read_tokenizer(config)
        with torch.random.fork_rng():
            # The generator is forked, so that the run's own draws do not depend on a policy being
            # made.
            torch.manual_seed(seed)
            network = cls.build_network(config)
        return cls(config, network, tokenizer)

    @staticmethod
    @abc.abstractmethod
    def build_network(config: ConfigT) -> NetworkT:
        """Build a network with new weights, from the global random state."""

    def describe(self) -> str:
        """Describe in one line how it acts, as its checkpoint was interpreted."""
        config: Any = self.config
        kind = f"OpenVLA-OFT, {config.head}" if hasattr(config, "head") else "OpenVLA"
        bounds, dtype = config.action_bounds, next(self._network.parameters()).dtype
        state = "" if self._proprio is None else f" and {self._proprio.key}"
        return (
            f"{kind}: sees {', '.join(config.cameras)}{state} ({config.images}), decides "
            f"{config.chunk_size} x {config.action_dim} numbers by the statistics {config.norm_key!r} "
            f"({config.normalization}, gripper {bounds.gripper}), {str(dtype).removeprefix('torch.')}"
        )

    def save(self, folder: Path | str) -> None:
        """Write the public layout to a new folder, all of it or nothing.

        Raises: CheckpointError.
        """
        index = None if self._origin is None else self._origin.index
        tensors, parts = self._split_by_file(self.checkpoint_tensors())
        write_weights(Path(folder), tensors, self.checkpoint_files(), index, parts)

    def copy(self) -> Self:
        """Return the same policy with its own copy of the weights."""
        copied = type(self)(
            self.config, copy.deepcopy(self._network), self._tokenizer, self._origin
        )
        if self._record is not None:
            copied.replay_acting(True, self._record)
        return copied

    def adapted(self, lora: LoraConfig, seed: int) -> Self:
        """Return the same policy with new adapters, which are trained instead of its weights; at
        first it acts as before.

        Existing adapters are merged into the weights.
        """
        # Rebuilt, because adapters are injected in place: a second set would wrap the first.
        return self._rebuilt(lora, merged_tensors(self._network), seed)

    def merged(self) -> Self:
        """Return the same policy with its adapters merged into the weights, for software that
        cannot load adapters.
        """
        return self._rebuilt(None, merged_tensors(self._network), seed=0)

    def tensor_plan(self) -> TensorPlan:
        """Return the layers of the trunk that tensor parallelism cuts."""
        trunk = self._network.language_model
        return decoder_plan(self._network, "language_model.model.layers", trunk.config)

    def recompute_activations(self) -> None:
        """Recompute the activations of towers and trunk in each later backward pass instead of
        storing them.
        """
        recompute_in_backward(*self._network.block_stacks())
        self.recomputes_activations = True

    def compile_blocks(self) -> None:
        """Compile the blocks of towers and trunk, for acting and for learning, on the network's
        present device. Each is compiled at its first call.

        Raises: ConfigError if nothing can compile for that device.
        """
        *towers, trunk = self._network.block_stacks()
        for tower in towers:
            compile_blocks(tower, self._device, has_open_length=False)
        compile_blocks(trunk, self._device, has_open_length=True)

    def replay_acting(self, is_wanted: bool, record: Record | None = None) -> None:
        """Start or stop recording and replaying calls that act without a gradient; stopping
        discards the recordings.

        For a network on a GPU. There is one recording for each number of rows and width of prompts,
        both padded.

        Args:
            is_wanted: whether to record and replay.
            record: makes a recording; None for CUDA graphs.
        """
        self._record = (record or CudaRecorder()) if is_wanted else None
        self._replayed.clear()

    @property
    def network(self) -> NetworkT:
        """The network, which holds the parameters."""
        return self._network

    @property
    def compiles_blocks(self) -> bool:
        """Whether blocks are compiled."""
        return isinstance(next(iter(self._network.block_stacks()[-1])), CompiledBlock)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which converts prompts to ids."""
        return self._tokenizer

    @property
    def feature_size(self) -> int:
        """Width of the language model."""
        return self.config.llm.hidden_size

    def prepare(self, observations: Sequence[Observation]) -> PrismaticBatch:
        """Prepare one row for each observation, on the network's device."""
        require_dicts(observations)
        return self._processor.prepare(observations, self._device)

    def augmented_preparation(
        self, config: AugmentationConfig, generator: torch.Generator
    ) -> Callable[[Sequence[Observation]], PrismaticBatch]:
        """Return a `prepare` for training that changes frames at random, by draws from `generator`."""
        pipeline = training_pipeline(self.config.images, config, generator)
        processor = PrismaticProcessor(self.config, self._tokenizer, self._proprio, pipeline)
        return lambda observations: processor.prepare(observations, self._device)

    def trace_decision(self, observation: Observation, tokens: np.ndarray) -> Iterator[TracedValue]:
        """Yield what is computed on the way from an observation to the tokens that were chosen, [T]."""
        return trace_decision(self, observation, tokens)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return parameters under their public names; views, not copies."""
        return {public_name(name): tensor for name, tensor in self._network.state_dict().items()}

    def load_checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors with public names into the network; every name and shape has to match."""
        check_names(self.checkpoint_tensors(), tensors)
        self._network.load_state_dict({timm_name(name): tensor for name, tensor in tensors.items()})

    def _split_by_file(
        self, tensors: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Mapping[str, Tensor]]]:
        """Split tensors for saving: the main weights, and those in separate files, by file name."""
        return tensors, {}

    @property
    def _proprio(self) -> ProprioConfig | None:
        """The scaling of proprioception; None if the policy does not use it."""
        return None

    def _acting(self, compute: Compute, batch: PrismaticBatch, *columns: Tensor) -> Tensors:
        """Return `compute(batch, *columns)`, a method of this policy, replayed from a recording if
        that is switched on.

        Columns are tensors [B, ...], and so are the results.
        """
        if self._record is None or torch.is_grad_enabled():
            return compute(batch, *columns)
        num_columns = len(batch.columns)

        def computed(*inputs: Tensor) -> Tensors:
            return compute(PrismaticBatch(*inputs[:num_columns]), *inputs[num_columns:])

        replayed = self._replayed.get(compute.__name__)
        if replayed is None:
            replayed = self._replayed[compute.__name__] = ReplayedCall(self._network, self._record)
        batch = batch.widened(PROMPT_WIDTH, self.config.llm.pad_token_id)
        return replayed(computed, *batch.columns, *columns)

    @property
    def _device(self) -> torch.device:
        return next(self._network.parameters()).device

    def _rebuilt(self, lora: LoraConfig | None, tensors: Mapping[str, Tensor], seed: int) -> Self:
        config = msgspec.structs.replace(self.config, lora=lora)
        network = build_with_weights(lambda: self.build_network(config), tensors, seed)
        return type(self)(config, network, self._tokenizer, self._origin)


def checkpoint_files(
    config: PrismaticConfig,
    extension: Extension,
    tokenizer: Tokenizer,
    origin: PublicFolder | None,
    proprio: ProprioConfig | None = None,
) -> dict[str, bytes]:
    """Return the files beside the weights.

    Args:
        config: the policy's configuration.
        extension: settings that the public `config.json` lacks.
        tokenizer: written if the loaded folder had none.
        origin: folder that the policy was loaded from; None for one that was made here.
        proprio: scaling of proprioception, for a policy that was made here.
    """
    # The loaded folder's files come back byte for byte, so other software reads a trained
    # checkpoint as it read the first.
    files = {} if origin is None else dict(origin.files)
    if TOKENIZER_FILE not in files:
        files[TOKENIZER_FILE] = tokenizer.to_str(pretty=True).encode()
    if CONFIG_FILE not in files:
        files[CONFIG_FILE] = encode_json(
            public_config(config, _describe_statistics(config, proprio), proprio)
        )
    # A folder without our settings stays as public as it was.
    if extension != Extension():
        files[EXTENSION_FILE] = encode_json(extension)
    return files


def _describe_statistics(config: PrismaticConfig, proprio: ProprioConfig | None) -> dict[str, Any]:
    bounds = config.action_bounds
    statistics: dict[str, Any] = {
        "action": {"q01": bounds.low, "q99": bounds.high, "mask": bounds.is_scaled}
    }
    if proprio is not None:
        statistics["proprio"] = {"q01": proprio.low, "q99": proprio.high}
    return {config.norm_key: statistics}


def trace_decision(
    policy: Any, observation: Observation, tokens: np.ndarray
) -> Iterator[TracedValue]:
    """Yield the values of a decision: images, proprioception, prompt, and the chunk before and after scaling.

    Args:
        policy: the `PrismaticPolicy` that decided.
        observation: what it saw.
        tokens: what it chose, int64 [T], or float32 [T] of a continuous head.
    """
    for camera in policy.config.cameras:
        images = torch.from_numpy(observation[camera].copy()).permute(2, 0, 1)[None]
        for name, stage in image_stages(policy.config.images).items():
            images = stage(images, policy.config.image_size)
            yield TracedValue(name, _to_numbers(images[0].permute(1, 2, 0)), camera)
    batch = policy.prepare([observation])
    if batch.proprio is not None:
        yield TracedValue("proprioception", _to_numbers(batch.proprio[0]))
    prompt = batch.prompts[0, : int(batch.prompt_lengths[0])]
    yield TracedValue("prompt_ids", _to_numbers(prompt))
    config, unit = policy.config, tokens
    if np.issubdtype(tokens.dtype, np.integer):
        # continuous heads have no tokens: their numbers are in the unit range already
        tokenizer = ActionTokenizer(config.llm.vocab_size, config.num_bins, config.action_bounds)
        unit = tokenizer.to_unit(tokens)
    unit = unit.reshape(-1, config.action_dim)
    yield TracedValue("unit_action", unit.astype(np.float64))
    yield TracedValue("action", ActionScaler(config.action_bounds).unscaled(unit))


def _to_numbers(tensor: torch.Tensor) -> np.ndarray:
    numbers: np.ndarray = tensor.cpu().numpy()
    return numbers
