"""Environments of the verifiers library, unchanged, with the protocol of text environments.

Not imported by `vla_rl.endpoint`; verifiers itself is imported in the environment's process only.
"""

from vla_rl.endpoint.verifiers.episode import VerifiersEpisode
from vla_rl.endpoint.verifiers.played import Played
from vla_rl.endpoint.verifiers.pool import VerifiersConfig, VerifiersPool
from vla_rl.endpoint.verifiers.worker import VerifiersWorker

__all__ = ["Played", "VerifiersConfig", "VerifiersEpisode", "VerifiersPool", "VerifiersWorker"]
