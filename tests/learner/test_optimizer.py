"""The optimizer's learning rate, and its state by name."""

import pytest
import torch
from torch import nn

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.learner import ImitationConfig, OptimizerConfig
from vla_rl.learner.estimates.rank_memory import training_bytes
from vla_rl.learner.optimizer import PolicyOptimizer


def stepped(
    config: OptimizerConfig, num_steps: int
) -> tuple[nn.Linear, PolicyOptimizer, list[float]]:
    torch.manual_seed(0)
    network = nn.Linear(2, 1)
    optimizer = PolicyOptimizer(network, config)
    rates = []
    for _ in range(num_steps):
        torch.autograd.backward(network(torch.ones(1, 2)).sum())
        rates.append(optimizer.step().lr)
    return network, optimizer, rates


def test_the_learning_rate_warms_up_and_stays() -> None:
    _, _, rates = stepped(OptimizerConfig(lr=1.0, warmup_steps=4), 6)
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_learning_rate_falls_on_a_cosine() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=2, decay_steps=6, final_lr_share=0.2)
    _, _, rates = stepped(config, 8)
    # after the warm-up: 0.2 + 0.8 * (1 + cos(pi * k / 4)) / 2 for k = 0..4, then it stays
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.882843, 0.6, 0.317157, 0.2, 0.2], abs=1e-6)


def test_the_first_step_moves_every_parameter_by_the_learning_rate() -> None:
    torch.manual_seed(0)
    before = nn.Linear(2, 1).weight.detach().clone()
    network, _, _ = stepped(OptimizerConfig(lr=0.01, warmup_steps=0, max_grad_norm=1e-3), 1)
    torch.testing.assert_close(network.weight.detach(), before - 0.01, atol=1e-5, rtol=0)


def test_gradients_are_clipped_over_all_parameters_and_the_norm_is_reported() -> None:
    network = nn.Linear(2, 1, bias=False)
    optimizer = PolicyOptimizer(network, OptimizerConfig(max_grad_norm=1.0))
    network.weight.grad = torch.tensor([[3.0, 4.0]])
    assert optimizer.step().grad_norm == pytest.approx(5.0)
    moments = optimizer.state_tensors()["exp_avg/weight"]
    # a tenth of the gradient, clipped to norm 1
    torch.testing.assert_close(moments, torch.tensor([[0.06, 0.08]]))


def test_a_step_by_a_norm_that_was_read_before_is_the_same_step() -> None:
    weights = []
    for is_read_before in (False, True):
        torch.manual_seed(0)
        network = nn.Linear(3, 2)
        optimizer = PolicyOptimizer(network, OptimizerConfig(max_grad_norm=0.5, warmup_steps=0))
        torch.autograd.backward(network(torch.ones(1, 3)).square().sum())
        norm = float(optimizer.measure_gradient()) if is_read_before else None
        assert optimizer.step(norm).grad_norm > 0.5
        weights.append(network.weight.detach().clone())
    assert torch.equal(*weights)


def test_parameters_without_a_gradient_have_no_state() -> None:
    network = nn.ModuleDict({"used": nn.Linear(1, 1), "unused": nn.Linear(1, 1)})
    optimizer = PolicyOptimizer(network, OptimizerConfig())
    torch.autograd.backward(network["used"](torch.ones(1, 1)).sum())
    optimizer.step()
    assert {name.split("/")[-1] for name in optimizer.state_tensors()} == {
        "num_steps",
        "used.weight",
        "used.bias",
    }
    again = PolicyOptimizer(network, OptimizerConfig())
    again.load_tensors(optimizer.state_tensors())
    assert again.num_steps == 1


def test_a_state_of_another_network_is_refused() -> None:
    _, optimizer, _ = stepped(OptimizerConfig(), 1)
    state = optimizer.state_tensors()
    for network, complaint in (
        (nn.Linear(3, 1), r"state of weight is \[1, 2\], expected \[1, 3\]"),
        (nn.Sequential(nn.Linear(2, 1)), "unknown names, such as 'exp_avg/bias'"),
    ):
        with pytest.raises(CheckpointError, match=complaint):
            PolicyOptimizer(network, OptimizerConfig()).load_tensors(state)
    del state["exp_avg_sq/bias"]
    with pytest.raises(CheckpointError, match="has no 'exp_avg_sq/bias'"):
        PolicyOptimizer(nn.Linear(2, 1), OptimizerConfig()).load_tensors(state)


def test_a_decay_that_ends_before_the_warm_up_is_refused() -> None:
    with pytest.raises(ConfigError, match="decay_steps is 5, expected more than warmup_steps = 10"):
        OptimizerConfig(decay_steps=5)


def test_weights_in_bfloat16_move_as_their_float32_masters_do() -> None:
    """At 5e-6 a step is far below the distance of two bfloat16 numbers near 0.02: without masters
    next to nothing moves.
    """
    torch.manual_seed(0)
    start = (0.02 * torch.randn(64, 64)).bfloat16()
    ends = {}
    for dtype in (torch.float32, torch.bfloat16):
        network = nn.Linear(64, 64, bias=False, dtype=dtype)
        network.weight.data.copy_(start)
        optimizer = PolicyOptimizer(network, OptimizerConfig(lr=5e-6, warmup_steps=0))
        for _ in range(100):
            torch.autograd.backward(network(torch.ones(1, 64, dtype=dtype)).sum())
            optimizer.step()
        ends[dtype] = network.weight.detach()
    assert (ends[torch.float32] - start.float()).abs().min() > 4e-4
    assert torch.equal(ends[torch.bfloat16], ends[torch.float32].bfloat16())


def test_gradients_of_bfloat16_weights_add_up_in_float32() -> None:
    network = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    optimizer = PolicyOptimizer(network, OptimizerConfig(max_grad_norm=1e9))
    for gradient in (256.0, *[1.0] * 8):  # bfloat16 has no 257
        torch.autograd.backward(network(torch.full((1, 1), gradient, dtype=torch.bfloat16)).sum())
        assert network.weight.grad is None
    assert optimizer.step().grad_norm == pytest.approx(264.0)


def test_masters_go_on_from_a_saved_state_to_the_last_bit() -> None:
    def train(network: nn.Module, optimizer: PolicyOptimizer) -> None:
        torch.autograd.backward(network(torch.ones(1, 8, dtype=torch.bfloat16)).sum())
        optimizer.step()

    torch.manual_seed(0)
    network = nn.Linear(8, 8, dtype=torch.bfloat16)
    optimizer = PolicyOptimizer(network, OptimizerConfig(lr=1e-5))
    train(network, optimizer)
    again = nn.Linear(8, 8, dtype=torch.bfloat16)
    again.load_state_dict(network.state_dict())
    resumed = PolicyOptimizer(again, OptimizerConfig(lr=1e-5))
    resumed.load_tensors(
        {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    )
    train(network, optimizer)
    train(again, resumed)
    assert resumed.state_tensors().keys() == optimizer.state_tensors().keys()
    assert all(
        torch.equal(tensor, resumed.state_tensors()[name])
        for name, tensor in optimizer.state_tensors().items()
    )
    assert not torch.equal(optimizer.state_tensors()["master/weight"], network.weight.float())


def test_a_state_with_masters_goes_on_in_float32_from_them() -> None:
    torch.manual_seed(0)
    rounded = nn.Linear(8, 8, dtype=torch.bfloat16)
    optimizer = PolicyOptimizer(rounded, OptimizerConfig(lr=1e-5))
    torch.autograd.backward(rounded(torch.ones(1, 8, dtype=torch.bfloat16)).sum())
    optimizer.step()
    exact = nn.Linear(8, 8)
    exact.load_state_dict(rounded.state_dict())
    PolicyOptimizer(exact, OptimizerConfig()).load_tensors(optimizer.state_tensors())
    assert torch.equal(exact.weight, optimizer.state_tensors()["master/weight"])
    assert not torch.equal(exact.weight, rounded.weight.float())


def test_the_last_optimizer_of_a_network_gets_its_gradients() -> None:
    """As where a policy imitates first and learns by reinforcement then.

    The first optimizer may live on.
    """
    network = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    first, last = (
        PolicyOptimizer(network, OptimizerConfig(lr=0.1, warmup_steps=0)) for _ in range(2)
    )
    before = network.weight.detach().clone()
    torch.autograd.backward(network(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
    assert last.step().grad_norm == pytest.approx(1.0)
    assert not torch.equal(network.weight, before)
    assert first.step().grad_norm == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_training_takes_is_counted_before_anything_is_made(dtype: torch.dtype) -> None:
    network = nn.Linear(8, 8, dtype=dtype)
    network.bias.requires_grad_(False)
    expected = training_bytes(network)
    optimizer = PolicyOptimizer(network, OptimizerConfig())
    torch.autograd.backward(network(torch.ones(1, 8, dtype=dtype)).sum())
    gradients = sum(
        moved.grad.nbytes for moved in optimizer._moved.values() if moved.grad is not None
    )
    optimizer.step()
    kept = sum(
        tensor.nbytes for name, tensor in optimizer.state_tensors().items() if tensor.dim() == 2
    )
    assert expected == gradients + kept


def test_a_decay_of_the_whole_run_ends_with_it_unless_the_warm_up_is_longer() -> None:
    config = OptimizerConfig(warmup_steps=12, decay_steps="run")
    assert config.over_run(104).decay_steps == 104
    assert config.over_run(12).decay_steps is None
    assert OptimizerConfig(decay_steps=50).over_run(104).decay_steps == 50


def test_a_supervised_run_is_told_the_number_of_its_updates() -> None:
    with pytest.raises(ConfigError, match="decay_steps is 'run', expected the number of updates"):
        ImitationConfig(optimizer=OptimizerConfig(decay_steps="run"))
