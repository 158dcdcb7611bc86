"""How often the host waits for the device in an update and in a decision."""

from typing import Any

import pytest

from benchmarks.gpu.syncs import decision_waits, update_waits
from benchmarks.gpu.tiny_policies import FAMILIES


def families(*proofs: str) -> list[Any]:
    """All families; those named are proofs, because others of the suite run the same code."""
    return [
        pytest.param(family, marks=pytest.mark.proof if family in proofs else ())
        for family in FAMILIES
    ]


@pytest.mark.parametrize(
    "family",
    [
        each
        for each in families("oft tokens", "oft film", "oft l1")
        if each.values != ("oft diffusion",)  # it has no likelihood
    ],
)
def test_an_update_waits_once_for_each_optimizer_step(family: str) -> None:
    for_each_step, beyond = update_waits(family)
    assert for_each_step <= 1
    assert beyond <= 1


@pytest.mark.parametrize("family", families("oft tokens", "oft adapters", "oft l1"))
def test_a_batch_of_decisions_waits_once(family: str) -> None:
    assert decision_waits(family) == 1
