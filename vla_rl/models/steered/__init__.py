"""Policies over a frozen base: a small head corrects or steers what another policy does.

The base is any policy of this package that decides a whole chunk in one pass, or a flow policy.
"""

from typing import TYPE_CHECKING

from vla_rl.models.steered.config import SteeringConfig as SteeringConfig
from vla_rl.util.imports import lazy_names

if TYPE_CHECKING:
    from vla_rl.models.steered.policy import SteeredPolicy as SteeredPolicy


__getattr__, __dir__ = lazy_names(__name__)
