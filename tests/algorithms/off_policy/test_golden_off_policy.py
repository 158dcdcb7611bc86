"""Off-policy losses and gradients beside those of other projects' code, which was run."""

import pytest

from benchmarks.off_policy_golden import PROJECTS


@pytest.mark.parametrize("project", PROJECTS)
def test_losses_and_gradients_are_those_of_the_project(project: str) -> None:
    differences = PROJECTS[project]()
    assert differences
    assert {name: value for name, value in differences.items() if not value <= 1e-5} == {}
