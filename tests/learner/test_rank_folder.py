"""The folder from which ranks read the policy, if the run that made it was killed."""

import os
import tempfile
from pathlib import Path

import pytest

from vla_rl.actors import Runtime
from vla_rl.learner import LearnerConfig
from vla_rl.learner.distributed.group import FOLDER_PREFIX, RankGroup


async def test_the_next_start_of_ranks_removes_the_policy_of_a_run_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / f"{FOLDER_PREFIX}of-a-killed-run"
    left.mkdir()
    (left / "policy").write_bytes(bytes(10))
    async with Runtime() as runtime:
        with pytest.raises(AttributeError):
            await RankGroup(runtime, LearnerConfig(ranks=1)).start(object())
    assert os.listdir(tmp_path) == []
