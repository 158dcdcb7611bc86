"""Meta-World's tests need the package of vla_rl/requirements/metaworld.txt; without it they are
skipped with the command that installs it.
"""

from collections.abc import Iterator

import pytest

from vla_rl.envs.metaworld import MetaWorldEnv
from vla_rl.envs.metaworld.scene import load_metaworld


@pytest.fixture(autouse=True, scope="session")
def metaworld() -> None:
    try:
        load_metaworld()
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def drawer_env() -> Iterator[MetaWorldEnv]:
    env = MetaWorldEnv("metaworld_mt10", "drawer-open", image_size=64, quality="fast")
    yield env
    env.close()
