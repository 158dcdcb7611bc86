"""Base class of the OpenVLA-OFT policies, with tokens or with numbers."""

from collections.abc import Mapping

from torch import Tensor

from vla_rl.models.openvla_oft import checkpoint
from vla_rl.models.openvla_oft.config import OpenVlaOftConfig
from vla_rl.models.openvla_oft.network import OpenVlaOftNetwork
from vla_rl.models.openvla_oft.parts import split
from vla_rl.models.prismatic.config import ProprioConfig
from vla_rl.models.prismatic.policy import PrismaticPolicy
from vla_rl.models.prismatic.processor import PrismaticBatch


class OftPolicy(PrismaticPolicy[OpenVlaOftConfig, OpenVlaOftNetwork]):
    """A chunk of T = chunk_size * action_dim tokens or numbers from one bidirectional pass."""

    @staticmethod
    def build_network(config: OpenVlaOftConfig) -> OpenVlaOftNetwork:
        """Build a network with new weights, from the global random state."""
        return OpenVlaOftNetwork(config)

    def features(self, batch: PrismaticBatch) -> Tensor:
        """Return the trunk's output, averaged over the positions where the action is read, [B,
        feature_size].
        """
        return batch.spread(self._network.read(batch).mean(dim=1))

    def checkpoint_files(self) -> Mapping[str, bytes]:
        """Return `config.json`, `tokenizer.json`, `vla_rl.json`, and the other small files of a
        loaded folder.
        """
        return checkpoint.files_of(self.config, self._tokenizer, self._origin)

    def _files_of(
        self, tensors: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Mapping[str, Tensor]]]:
        """Split tensors by file: several for continuous heads and FiLM, as OpenVLA-OFT's code
        expects; else one.

        Only vla_rl can load a policy that is saved with adapters.
        """
        is_theirs = (
            self.config.head != "tokens" or self.config.has_film
        ) and self.config.lora is None
        return split(tensors) if is_theirs else (tensors, {})

    @property
    def _proprio(self) -> ProprioConfig | None:
        return self.config.proprio
