"""A multilayer perceptron over a state vector, for low-dimensional environments.

The configuration imports fast; torch is imported when `MlpPolicy` is first used.
"""

from typing import TYPE_CHECKING, Any

from vla_rl.models.mlp.config import MlpConfig

if TYPE_CHECKING:
    from vla_rl.models.mlp.policy import MlpPolicy

__all__ = ["MlpConfig", "MlpPolicy"]


def __getattr__(name: str) -> Any:
    if name == "MlpPolicy":
        from vla_rl.models.mlp.policy import MlpPolicy

        return MlpPolicy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
