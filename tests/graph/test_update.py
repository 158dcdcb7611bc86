"""The results of one update."""

import pytest

from vla_rl.graph import Update
from vla_rl.graph.update import CriticalPath, Values


def test_a_value_that_was_freed_is_named_with_the_way_to_keep_it() -> None:
    with pytest.raises(KeyError, match=r"'groups' was not kept.*Executor\(keep=\('groups',\)\)"):
        Values(report=1)["groups"]


def test_an_update_lasts_from_its_admission_to_its_end() -> None:
    update = Update(
        index=3,
        values=Values(report=1),
        metrics={},
        spans={},
        started=10.0,
        ended=12.5,
        critical_path=CriticalPath(update=3, duration_s=2.5, segments=()),
    )
    assert update.duration_s == 2.5
    assert update.statuses == {}
    assert update.values["report"] == 1
