"""Contracts: tests of the rules that environments, policies, engines, actors of your own have to keep.

Inherit from one in a test file and say how yours is made; pytest finds the tests:

    from vla_rl.testing import EnvContract
    from vla_rl.types import EnvSpec

    class TestThermostat(EnvContract):
        spec = EnvSpec(id="my_envs:me/thermostat-v0")

The package's own environments, policies, engines and actors are held to the same ones. pytest is needed
here alone, so that it is no requirement of the package; no plugin of pytest is.
"""

from typing import TYPE_CHECKING

from vla_rl.util.imports import lazy_names

if TYPE_CHECKING:
    from vla_rl.testing.actors import ActorContract as ActorContract
    from vla_rl.testing.engines import (
        ActionEngineContract as ActionEngineContract,
        ChatEngineContract as ChatEngineContract,
        OpenEngine as OpenEngine,
    )
    from vla_rl.testing.envs import (
        EmbodiedEnvContract as EmbodiedEnvContract,
        EnvContract as EnvContract,
    )
    from vla_rl.testing.policies import PolicyContract as PolicyContract

try:
    import pytest
except ImportError as error:
    raise ImportError("vla_rl.testing needs pytest; run `pip install pytest`.") from error

# An assertion of a contract then shows both values, as one in a test file does.
pytest.register_assert_rewrite(
    *(f"{__name__}.{module}" for module in ("actors", "engines", "envs", "policies"))
)

__getattr__, __dir__ = lazy_names(__name__)
