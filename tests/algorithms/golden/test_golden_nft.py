"""The loss of pi-StepNFT is that of RLinf 0.3.0, with its gradient by the velocity."""

import pytest

from benchmarks.flow_nft import SPACES, NftCases

GOLDEN = NftCases()


def test_losses_and_gradients_are_rlinfs() -> None:
    errors = GOLDEN.errors()
    assert len(errors) == 2 * len(GOLDEN.cases)
    assert max(errors.values()) <= 1e-4, errors


@pytest.mark.parametrize("name", GOLDEN.cases)
def test_a_masked_decision_has_no_gradient(name: str) -> None:
    _, gradient = GOLDEN.compute(name)
    is_counted = GOLDEN.arrays["in_mask"][:, 0]
    assert not gradient[~is_counted].any()
    assert gradient[is_counted].any()


def test_there_are_both_targets_and_both_losses() -> None:
    found = {(each["nft_target_space"], each["nft_loss_form"]) for each in GOLDEN.cases.values()}
    assert found == {(space, form) for space in SPACES for form in ("dpo", "mse")}
    assert len(GOLDEN.cases) == 25
