"""How often the host waits for the device in an update and in a decision."""

import pytest

from benchmarks.gpu.syncs import decision_waits, update_waits
from benchmarks.gpu.tiny_policies import FAMILIES


@pytest.mark.parametrize("family", [each for each in FAMILIES if each != "oft diffusion"])
def test_an_update_waits_once_for_each_optimizer_step(family: str) -> None:
    for_each_step, beyond = update_waits(family)
    assert for_each_step <= 1
    assert beyond <= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_decisions_waits_once(family: str) -> None:
    assert decision_waits(family) == 1
