"""What a policy needs to be sent to learner ranks."""

from pathlib import Path

import pytest

from vla_rl.errors import ConfigError
from vla_rl.learner.distributed.seats import Seating
from vla_rl.learner.distributed.starting import saved
from vla_rl.models.openvla_oft import OpenVlaOft, tiny


def test_compiled_blocks_are_refused(tmp_path: Path) -> None:
    policy = OpenVlaOft.create(tiny(), seed=0)
    policy.compile_blocks()
    with pytest.raises(ConfigError, match=r"blocks are compiled, .*--learner\.ranks 1"):
        saved(policy, tmp_path, Seating(()))
    assert not list(tmp_path.iterdir())
