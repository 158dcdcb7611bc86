"""The number format of what algorithms compute, and the entropy of a policy."""

import ast
import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from small_batches import batch_of, loss_of, random_batch
from torch import Tensor

import vla_rl.algorithms
from vla_rl.algorithms import AGGREGATIONS, KL_ESTIMATORS, aggregation, count_denominators, entropy
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
