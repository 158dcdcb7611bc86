"""Environments of the verifiers library, unchanged, with the protocol of text environments.

Not imported by `vla_rl.endpoint`; verifiers itself is imported in the environment's process only.
"""

from vla_rl.endpoint.verifiers.episode import VerifiersEpisode
from vla_rl.endpoint.verifiers.pool import VerifiersConfig, VerifiersPool, VerifiersWorker
from vla_rl.endpoint.verifiers.rollouts import RolloutResult

__all__ = [
    "RolloutResult",
    "VerifiersConfig",
    "VerifiersEpisode",
    "VerifiersPool",
    "VerifiersWorker",
]
