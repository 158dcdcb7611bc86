"""What a policy needs to be sent to learner ranks."""

from pathlib import Path

import pytest

from vla_rl.errors import ConfigError
from vla_rl.learner.distributed.rank_hosts import RankAssignments, save_policy
from vla_rl.models.openvla_oft import OpenVlaOft, tiny


def test_compiled_blocks_are_refused(tmp_path: Path) -> None:
    policy = OpenVlaOft.create(tiny(), seed=0)
    policy.compile_blocks()
    with pytest.raises(ConfigError, match=r"blocks are compiled, .*--learner\.ranks 1"):
        save_policy(policy, tmp_path, RankAssignments(()))
    assert not list(tmp_path.iterdir())
