"""What docs/algorithms.md says of all algorithms: its examples run as written, numbers have the format that it names,
the entropy is that of the policy."""

import ast
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_batches import batch_of, gradient, loss_of, random_batch, row
from torch import Tensor

import vla_rl.algorithms
from vla_rl.algorithms import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    RewardBatch,
    aggregation,
    count_denominators,
    entropy,
)
from vla_rl.algorithms.advantages import ADVANTAGE_PARAMETERS
from vla_rl.algorithms.losses import (
    LOSSES,
    PARAMETERS,
    POLICY_LOSSES,
    CorrectionConfig,
    KlLossConfig,
    PolicyLossConfig,
    ValueLossConfig,
    policy_loss,
    value_loss,
)
from vla_rl.algorithms.tensors import full_precision
from vla_rl.types import ActionChunk, EnvSpec, EpisodeSpec, Step, StopReason, Trajectory

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
BLOCKS = [block.split("```")[0] for block in PAGE.read_text().split("```python\n")[1:]]


def trajectory_of(episode_id: int, stop_reason: StopReason, num_steps: int = 1) -> Trajectory:
    chunk = ActionChunk(
        actions=np.zeros((1, 2), np.float32),
        tokens=np.zeros(2, np.int64),
        log_probs=np.zeros(2, np.float32),
        weight_version=0,
    )
    return Trajectory(
        episode=EpisodeSpec(
            episode_id=episode_id,
            group_id=0,
            member=episode_id,
            env=EnvSpec(id="toy"),
            task="t",
            seed=0,
            policy_seed=0,
        ),
        steps=tuple(
            Step(observation={}, chunk=chunk, rewards=np.zeros(1, np.float32))
            for _ in range(num_steps)
        ),
        final_observation={},
        stop_reason=stop_reason,
    )


def test_the_example_runs_as_written() -> None:
    log_prob = torch.zeros(3, 2, requires_grad=True)
    names: dict[str, Any] = {
        "trajectories": [
            trajectory_of(0, StopReason.SUCCESS),
            trajectory_of(1, StopReason.TIME_LIMIT),
        ],
        "mask": torch.tensor([[True, True], [True, True], [True, False]]),
        "trajectory_of_row": torch.arange(3),
        "log_prob": log_prob,
        "behavior_log_prob": torch.zeros(3, 2),
        "advantage_of_row": torch.tensor([1.0, 0.0, -1.0]),
        "micro_batches": [slice(0, 2), slice(2, 3)],
    }
    exec(compile(BLOCKS[0], str(PAGE), "exec"), names)
    np.testing.assert_allclose(
        np.concatenate(names["advantages"]), [0.5**0.5, -(0.5**0.5)], rtol=1e-5
    )
    # 3 trajectories; -A / (tokens of the trajectory) / 3
    assert log_prob.grad is not None
    torch.testing.assert_close(
        log_prob.grad, torch.tensor([[-1 / 6, -1 / 6], [0.0, 0.0], [1 / 3, 0.0]])
    )
    assert names["metrics"]["ratio_mean"] == 1.0


def test_functions_of_ones_own_run_as_written(import_folder) -> None:
    (import_folder / "my_rl.py").write_text(BLOCKS[1])
    names: dict[str, Any] = {}
    exec(compile(BLOCKS[2], str(PAGE), "exec"), names)
    import my_rl

    rewards = [
        my_rl.quick_success(trajectory_of(0, reason, 2))
        for reason in (StopReason.SUCCESS, StopReason.TIME_LIMIT)
    ]
    assert rewards == pytest.approx([0.99**2, 0.0])
    ranked = names["estimate"](
        RewardBatch(rewards=np.array([0.3, 5.0, 0.3]), group=np.array([0, 0, 0]))
    )
    assert ranked.per_trajectory() == [-0.5, 1.0, -0.5]
    # sqrt(4) = 2 is bounded at 1.5, sqrt(1.21) = 1.1 is not
    torch.testing.assert_close(
        gradient(names["loss"], batch_of((4.0, 1.21), (1.0, -1.0))), row(-1.5, 1.1)
    )


def test_a_td3_step_of_the_page_runs_as_written() -> None:
    state, action = torch.zeros(3, 2), torch.full((3, 4), 0.5)
    action_scale = torch.tensor(2.0, requires_grad=True)

    def critics(state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return torch.stack([action.sum(dim=1), 2.0 * action.sum(dim=1)])

    names: dict[str, Any] = {
        "rewards": torch.tensor([[0.0, 1.0]] * 3),
        "num_rewards": torch.tensor([2, 2, 1]),
        "terminated": torch.tensor([True, False, False]),
        "state": state,
        "next_state": state,
        "action": action,
        "reference": torch.zeros(3, 4),
        "intervened": torch.tensor([[False, False], [True, False], [False, False]]),
        "actor": lambda state: torch.full((3, 4), 0.1) * action_scale,
        "target_actor": lambda state: torch.full((3, 4), 0.9),
        "critics": critics,
        "target_critics": critics,
    }
    exec(compile(BLOCKS[3], str(PAGE), "exec"), names)
    # 0.97 at the success; 0.97 + 0.97^2 V and 0.97 V, where V is above 1: the bound holds
    torch.testing.assert_close(names["targets"], torch.tensor([0.97, 1.0, 1.0]))
    # actions of 0.2, values of 0.8; targets of 0, and of 0.5 in the first control step of row 1
    errors = (10 * 0.2**2 + 2 * 0.3**2) / 12
    assert names["actor_loss"].item() == pytest.approx(-0.5 * 0.8 + 2.8 * errors)
    names["actor_loss"].backward()
    assert action_scale.grad is not None


@pytest.mark.parametrize(
    "table",
    [PARAMETERS, ADVANTAGE_PARAMETERS, AGGREGATIONS],
    ids=["loss", "advantage", "aggregation"],
)
def test_everything_that_can_be_chosen_is_in_a_table_of_the_page(table) -> None:
    rows = {
        line.split("`")[1]: line for line in PAGE.read_text().splitlines() if line.startswith("| `")
    }
    assert set(table) <= set(rows)


def test_the_page_names_the_defaults_as_they_are() -> None:
    rows = {
        line.split("`")[1]: line for line in PAGE.read_text().splitlines() if line.startswith("| `")
    }
    for name, parameters in PARAMETERS.items():
        told = {
            field: float(value) for field, value in re.findall(r"`(\w+)` ([\d.e-]+)", rows[name])
        }
        if "PPO's" in rows[name]:
            told |= {
                field: value
                for field, value in PARAMETERS["ppo"].items()
                if isinstance(value, float)
            }
        assert told == {
            field: value for field, value in parameters.items() if isinstance(value, float)
        }, name


def test_every_golden_case_has_a_row_on_the_page_and_every_row_a_case() -> None:
    table = (
        PAGE.read_text()
        .split("## The same numbers as other systems")[1]
        .split("Different on purpose")[0]
    )
    named = {tuple(name.split(": ")) for name in re.findall(r"`(\w+: [^`]+)`", table)}
    folder = Path(__file__).parent / "golden"
    cases = {
        path.stem: set(json.loads(path.read_text())["cases"]) for path in folder.glob("*.json")
    }
    for project, start in named:
        assert any(case.startswith(start) for case in cases[project]), (project, start)
    for project, names in cases.items():
        starts = tuple(start for other, start in named if other == project)
        # where ours differs is a table of its own
        other_names = ("advantage/gpg", "advantage/grpo/lone", "correction/loss", "reinpp")
        assert {name for name in names if not name.startswith((*starts, *other_names))} == set()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_becomes_float32_and_keeps_its_gradient(half: torch.dtype) -> None:
    tensor = torch.tensor([1.5, -2.0], dtype=half, requires_grad=True)
    found = full_precision(tensor)
    assert found.dtype is torch.float32
    assert found.tolist() == [1.5, -2.0]
    (found * 3.0).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_other_tensors_stay_themselves(dtype: torch.dtype) -> None:
    tensor = torch.ones(2, dtype=dtype)
    assert full_precision(tensor) is tensor


BATCH = random_batch()


def losses_of_a_batch(config: PolicyLossConfig) -> Callable[[], list[Tensor]]:
    def computed() -> list[Tensor]:
        losses, _ = policy_loss(config)(BATCH)
        return [losses, *torch.autograd.grad(losses.sum(), BATCH.log_prob)]

    return computed


def of_the_critic(config: ValueLossConfig) -> list[Tensor]:
    values = BATCH.behavior_log_prob, BATCH.log_prob.detach(), BATCH.advantage
    return [value_loss(config)(*values, BATCH.mask)[0]]


def aggregated(name: str) -> list[Tensor]:
    counted = count_denominators(BATCH.mask, length=20.1)
    return [aggregation(name)(BATCH.advantage, BATCH.mask, counted)]


CONFIGS = {
    **{
        name: PolicyLossConfig(name=name)
        for name in POLICY_LOSSES
        if not LOSSES[name].needs_predictions
    },
    **{
        f"{name}, {level}": PolicyLossConfig(name=name, level=level)
        for name in POLICY_LOSSES
        for level in ("action", "chunk", "sequence")
        if "level" in PARAMETERS[name]
    },
    **{
        f"ppo, {estimator}": PolicyLossConfig(
            name="ppo", kl=KlLossConfig(coef=0.1, estimator=estimator)
        )
        for estimator in (*KL_ESTIMATORS, "importance_weighted_k3")
    },
    **{
        f"ppo, {truncate}, {mask}": PolicyLossConfig(
            name="ppo",
            correction=CorrectionConfig(truncate=truncate, mask=mask, truncate_at=1.1),
        )
        for truncate, mask in (("token", "none"), ("sequence", "token"), ("none", "geometric"))
    },
}
COMPUTED: dict[str, Callable[[], list[Tensor]]] = {
    **{name: losses_of_a_batch(config) for name, config in CONFIGS.items()},
    "critic": lambda: of_the_critic(ValueLossConfig(clip=0.1)),
    "critic, huber": lambda: of_the_critic(ValueLossConfig(huber_delta=0.1)),
    "entropy": lambda: [entropy(BATCH.advantage)],
    **{f"{name}": (lambda name=name: aggregated(name)) for name in AGGREGATIONS},
}


@pytest.fixture
def no_single_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make float64 of every number that torch would make float32, for the time of a test."""
    monkeypatch.setattr(Tensor, "float", lambda tensor: tensor.double())
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


EXPECTED = {name: compute() for name, compute in COMPUTED.items()}
"""What each loss computes of float64 inputs where torch makes float32 of Python's numbers."""


@pytest.mark.usefixtures("no_single_precision")
@pytest.mark.parametrize("name", COMPUTED)
def test_of_float64_inputs_nothing_goes_through_float32(name: str) -> None:
    for found, expected in zip(COMPUTED[name](), EXPECTED[name], strict=True):
        assert expected.dtype is torch.float64
        torch.testing.assert_close(found, expected, rtol=1e-15, atol=1e-15)


def test_the_soft_gate_has_the_digits_of_its_temperature() -> None:
    # -A * sigmoid(tau * (rho - 1)) * 4 / tau with rho = 2; by hand, in Python's double precision
    batch = batch_of((2.0, 2.0), (1.0, -1.0))
    found, _ = loss_of("sapo", temperature_positive=1.1, temperature_negative=1.3)(batch)
    gate = [4.0 / tau / (1.0 + 2.718281828459045**-tau) for tau in (1.1, 1.3)]
    expected = torch.tensor([[-gate[0], gate[1]]], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-15, atol=0)


def _is_number(node: ast.expr, names: set[str]) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id in names)


def wheres_of_two_numbers(source: str) -> list[int]:
    """Return the lines of `torch.where` whose two choices are Python's numbers, which is float32."""
    tree, found = ast.parse(source), []
    for function in [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]:
        arguments = [*function.args.args, *function.args.kwonlyargs]
        numbers = {
            each.arg
            for each in arguments
            if each.annotation is not None and "Tensor" not in ast.unparse(each.annotation)
        }
        found += [
            call.lineno
            for call in ast.walk(function)
            if isinstance(call, ast.Call)
            and ast.unparse(call.func) == "torch.where"
            and len(call.args) == 3
            and all(_is_number(choice, numbers) for choice in call.args[1:])
        ]
    return found


def test_no_algorithm_chooses_between_two_python_numbers_with_torch() -> None:
    files = sorted(Path(inspect.getfile(vla_rl.algorithms)).parent.rglob("*.py"))
    found = {
        str(path): lines for path in files if (lines := wheres_of_two_numbers(path.read_text()))
    }
    assert found == {}
    before = "def f(a: Tensor, high: float):\n    return torch.where(a > 0.0, high, 1.0)\n"
    assert wheres_of_two_numbers(before) == [2]


def test_entropy_of_known_distributions() -> None:
    uniform = torch.zeros(256)
    coin = torch.log(torch.tensor([0.25, 0.75]))
    assert entropy(uniform).item() == pytest.approx(math.log(256.0))
    assert entropy(coin).item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))


def test_impossible_actions_add_nothing_to_entropy_or_gradient() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    result = entropy(logits)
    result.sum().backward()
    assert result.item() == pytest.approx(math.log(2.0))
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_the_gradient_of_entropy_is_that_of_finite_differences() -> None:
    logits = torch.tensor([[0.5, -1.0, 2.0]], requires_grad=True)
    entropy(logits).sum().backward()
    assert logits.grad is not None
    for index in range(3):
        bump = torch.zeros(1, 3)
        bump[0, index] = 1e-2
        difference = (
            entropy(logits.detach() + bump) - entropy(logits.detach() - bump)
        ).item() / 2e-2
        assert logits.grad[0, index].item() == pytest.approx(difference, abs=1e-4)
