"""A multilayer perceptron over a state vector, for low-dimensional environments.

The configuration imports fast; torch is imported when `MlpPolicy` is first used.
"""

from typing import TYPE_CHECKING

from vla_rl.models.mlp.config import MlpConfig as MlpConfig
from vla_rl.util.imports import lazy_names

if TYPE_CHECKING:
    from vla_rl.models.mlp.policy import MlpPolicy as MlpPolicy


__getattr__, __dir__ = lazy_names(__name__)
