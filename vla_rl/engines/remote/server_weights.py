"""The weights of one version, as servers load them from disk and as their log-probs show them.

network ─► checkpoint folder that loads by itself     and     log-probs of a short prompt's next token
"""

from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import numpy as np
import torch
from torch import nn

from vla_rl.actors.owned_folder import OwnedFolder, sweep
from vla_rl.engines.atomic_folder import writing_folder
from vla_rl.engines.vllm.layout import write_folder
from vla_rl.engines.vllm.requests import Answer
from vla_rl.engines.vllm.served import ServedLanguage
from vla_rl.errors import ConfigError
from vla_rl.types import Sampling

PROBE: Final = Sampling(temperature=0.7)
"""Sampling of the requests that compare a server with the learner; at 1 a server that ignores the
temperature would look right."""

NUM_PROBES: Final = 4

_PREFIX: Final = "vla_rl-weights-"

MAX_PROBE_GAP: Final = 0.2
"""Largest difference of log-probs that passes: bfloat16 stays below 0.1, other weights do not."""


class ServerWeights(NamedTuple):
    """One version of the weights, for servers."""

    folder: Path
    """A checkpoint that loads by itself."""

    probe: np.ndarray
    """float32 [V]: the log-probs of the probe prompt's next token, at `PROBE`'s temperature."""

    def gap(self, answers: list[Answer]) -> float:
        """Return the largest difference of the answers' first log-probs from these weights'."""
        return max(abs(float(self.probe[each.tokens[0]] - each.log_probs[0])) for each in answers)


class WeightFolders:
    """Writes versions of a policy's weights into a folder of its own, which it removes in the end.

    Args:
        served: the language policy.
        parent: folder that all servers reach under this path; None for a temporary one.
    """

    def __init__(self, served: ServedLanguage, parent: str | None) -> None:
        self._served, self._parent = served, parent
        self._num_written = 0
        self.probe_prompt = served.sample_request().token_ids

    def __enter__(self) -> Self:
        """Make the folder. Raises: ConfigError if it cannot be written."""
        try:
            if self._parent is not None:
                Path(self._parent).mkdir(parents=True, exist_ok=True)
            if self._parent is None:
                sweep(_PREFIX)
            self._owned = OwnedFolder(_PREFIX, self._parent)
        except OSError as error:
            raise ConfigError(f"engine.remote.weights_folder cannot be written: {error}") from error
        self._folder = self._owned.path.absolute()
        self._folder.chmod(0o755)  # servers may belong to another user
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove the folder."""
        self._owned.remove()

    def write(self, network: nn.Module, version: int) -> ServerWeights:
        """Write one version, on the device lane. Raises: CheckpointError."""
        prompt = torch.tensor([self.probe_prompt])
        with torch.inference_mode():
            logits = network(prompt.to(next(network.parameters()).device)).logits[0, -1].float()
            probe = torch.log_softmax(logits / PROBE.temperature, -1).cpu().numpy()
        tensors = {
            name: tensor.detach().cpu() for name, tensor in self._served.tensors(network).items()
        }
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._num_written += 1
        target = self._folder / f"version-{version}-{self._num_written}"
        with writing_folder(target, num_bytes) as writer:
            write_folder(writer.new_path("config.json").parent, self._served.layout)
            writer.write_tensors("model.safetensors", tensors)
        return ServerWeights(target, probe)
