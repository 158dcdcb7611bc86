"""A runtime for each test or for all tests of a file, and episodes to run."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from vla_rl.actors import Runtime
from vla_rl.types import EnvSpec, EpisodeSpec

Episode = Callable[..., EpisodeSpec]


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    async with Runtime(name="test", stop_grace_s=1.0) as runtime:
        yield runtime


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_runtime() -> AsyncIterator[Runtime]:
    """One for a file that has no need of its own: its fork servers import an environment once."""
    async with Runtime(name="test", stop_grace_s=1.0) as runtime:
        yield runtime


@pytest.fixture
def episode() -> Episode:
    """`episode(3, "vla_rl/toy_reach-v0", task_id=1)`: the third episode, of that environment with
    those arguments.
    """

    def make(number: int = 0, env_id: str = "vla_rl/toy_reach-v0", **kwargs: Any) -> EpisodeSpec:
        spec = EnvSpec(id=env_id, kwargs=kwargs)
        return EpisodeSpec(
            episode_id=number,
            group_id=number,
            member=0,
            env=spec,
            task=env_id,
            seed=100 + number,
            policy_seed=number,
        )

    return make
