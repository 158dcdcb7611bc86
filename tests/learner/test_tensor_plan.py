"""A tensor group shares the layers that a policy's family names, if their numbers can be dealt."""

from typing import Any

import pytest
from torch import nn

from vla_rl.errors import ConfigError
from vla_rl.learner.config import LearnerConfig
from vla_rl.learner.plan import TensorPlan, get_tensor_plan, require_tensor_plan

PLAN = TensorPlan(
    by_outputs=("up",), by_inputs=("down",), of_heads=("norm",), counts={"attention heads": 6}
)


class Planned:
    def tensor_plan(self) -> TensorPlan:
        return PLAN


class Unplanned: ...


def config(group: int) -> Any:
    return LearnerConfig(ranks=group, tensor_parallel=group)


def test_a_family_without_a_plan_is_refused_only_where_layers_are_shared() -> None:
    require_tensor_plan(Unplanned(), LearnerConfig())
    with pytest.raises(ConfigError, match="Unplanned has no plan for tensor parallelism"):
        require_tensor_plan(Unplanned(), config(2))
    with pytest.raises(ConfigError, match="Unplanned has no plan"):
        get_tensor_plan(Unplanned())


def test_numbers_that_the_ranks_cannot_deal_out_are_refused_by_name() -> None:
    assert get_tensor_plan(Planned()) is PLAN
    require_tensor_plan(Planned(), config(3))
    with pytest.raises(
        ConfigError,
        match="tensor_parallel is 4, but the trunk of Planned has 6 attention heads; expected a "
        "divisor of 6",
    ):
        require_tensor_plan(Planned(), config(4))


def test_the_numbers_that_are_cut_are_those_of_the_named_layers() -> None:
    network = nn.ModuleDict(
        {"up": nn.Linear(2, 3), "down": nn.Linear(3, 2, bias=False), "norm": nn.LayerNorm(2)}
    )
    network["down"].weight.requires_grad_(False)
    assert PLAN.num_cut(network, is_trained=True) == 2 * 3 + 3
    assert PLAN.num_cut(network, is_trained=False) == 3 * 2
