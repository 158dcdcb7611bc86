"""Check what losses report of the tokens that they bound."""

import pytest
from loss_batches import (
    batch_of,
    loss_of,
)


@pytest.mark.parametrize(("name", "bound"), [("gmpo", 2.0), ("cispo", 6.0), ("cpgd", 2.0)])
def test_the_clip_fraction_counts_the_tokens_that_were_bounded(name: str, bound: float) -> None:
    _, told = loss_of(name)(batch_of((bound, 1.1, 0.9), (1.0, 1.0, 1.0)))
    assert told.metrics()["clip_fraction"] == pytest.approx(1 / 3)
