"""What all policy losses have in common: their gradients, their masks, and independence of how an
update is split.
"""

import dataclasses

import msgspec
import pytest
import torch
from hypothesis import given, settings, strategies as st
from small_batches import finite_differences, gradient, random_batch

from vla_rl.algorithms import AGGREGATIONS, aggregation, count_denominators
from vla_rl.algorithms.losses import (
    LOSSES,
    PARAMETERS,
    POLICY_LOSSES,
    KlLossConfig,
    PolicyLossConfig,
    TokenBatch,
    chosen_tokens,
    policy_loss,
)

NAMES = sorted(name for name in POLICY_LOSSES if not LOSSES[name].needs_predictions)
WITH_STOPPED_GRADIENTS = {"gspo", "gmpo", "cispo", "cpgd"}
LEVELS = [
    (name, level) for name in NAMES if "level" in PARAMETERS[name] for level in ("action", "chunk")
]
ALL = [PolicyLossConfig(name=name) for name in NAMES] + [
    PolicyLossConfig(name=n, level=level) for n, level in LEVELS
]
DIFFERENTIABLE = [config for config in ALL if config.name not in WITH_STOPPED_GRADIENTS]


def name_of(config: PolicyLossConfig) -> str:
    return f"{config.name}-{config.level or 'default'}"


def on_policy(batch: TokenBatch) -> TokenBatch:
    """The same batch, made by the present weights."""
    same = batch.log_prob.detach()
    return dataclasses.replace(batch, behavior_log_prob=same, proximal_log_prob=same)


@pytest.mark.parametrize("config", DIFFERENTIABLE, ids=name_of)
def test_the_gradient_is_that_of_finite_differences(config) -> None:
    loss, batch = policy_loss(config), random_batch()

    def total(log_prob):
        return loss(dataclasses.replace(batch, log_prob=log_prob))[0].sum()

    torch.testing.assert_close(
        gradient(loss, batch), finite_differences(total, batch.log_prob), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_the_token_form_has_the_gradient_of_the_sequence_form(name) -> None:
    """Finite differences of  mean over sequences of -A * clipped geometric mean of ratios, written
    down on its own.
    """
    batch = random_batch(rows=6, seed=3, spread=0.6)
    advantage = batch.advantage[:, :1]  # one number a sequence
    batch = dataclasses.replace(batch, advantage=advantage)
    config = PolicyLossConfig(name=name, clip_low=0.1, clip_high=0.15)

    def sequence_form(log_prob):
        log_ratio = torch.where(batch.mask, log_prob - batch.behavior_log_prob, 0.0)
        if name == "gmpo":
            log_ratio = torch.where(
                advantage >= 0, log_ratio.clamp(max=0.15), log_ratio.clamp(min=-0.1)
            )
        ratio = (log_ratio.sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True)).exp()
        if name == "gspo":
            return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.9, 1.15)).mean()
        return (-advantage * ratio).mean()

    losses, _ = policy_loss(config)(batch)
    reduced = aggregation("seq_mean_token_mean")(losses, batch.mask, count_denominators(batch.mask))
    (found,) = torch.autograd.grad(reduced, batch.log_prob)
    torch.testing.assert_close(reduced.detach(), sequence_form(batch.log_prob).detach())
    torch.testing.assert_close(
        found, finite_differences(sequence_form, batch.log_prob), rtol=1e-6, atol=1e-8
    )


def test_cispo_has_the_gradient_of_its_weighted_log_prob() -> None:
    batch = random_batch(spread=1.0)
    weight = (batch.log_prob - batch.behavior_log_prob).detach().exp().clamp(0.0, 2.0)

    def frozen(log_prob):
        return torch.where(batch.mask, -weight * batch.advantage * log_prob, 0.0).sum()

    found = gradient(policy_loss(PolicyLossConfig(name="cispo", clip_high=1.0)), batch)
    torch.testing.assert_close(
        found, finite_differences(frozen, batch.log_prob), rtol=1e-6, atol=1e-7
    )


def test_cpgd_has_the_gradient_of_its_bounded_log_ratio_and_of_the_divergence_from_the_old_policy() -> (
    None
):
    batch = random_batch(spread=0.2)

    def objective(log_prob):
        log_ratio = log_prob - batch.behavior_log_prob
        bounded = torch.where(
            batch.advantage >= 0,
            log_ratio.clamp(max=0.1823215568),
            log_ratio.clamp(min=-0.2231435513),
        )
        divergence = torch.expm1(log_ratio) - log_ratio  # the k3 estimate of KL(behavior || policy)
        return torch.where(batch.mask, -batch.advantage * bounded + 0.3 * divergence, 0.0).sum()

    found = gradient(policy_loss(PolicyLossConfig(name="cpgd", drift_coef=0.3)), batch)
    torch.testing.assert_close(
        found, finite_differences(objective, batch.log_prob), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("config", ALL, ids=name_of)
def test_where_the_policies_agree_the_gradient_is_the_plain_policy_gradient(config) -> None:
    """-A for every unmasked token, at every ratio level; clip_cov drops the tokens it picked."""
    if config.name == "clip_cov":
        config = PolicyLossConfig(name="clip_cov", covariance_share=0.0)
    batch = on_policy(random_batch())
    # one advantage a control step or row, as the level means it
    if config.level in ("action", "chunk"):
        batch = dataclasses.replace(batch, advantage=batch.advantage[:, :1])
    expected = torch.where(batch.mask, -batch.advantage.expand_as(batch.mask), 0.0)
    torch.testing.assert_close(gradient(policy_loss(config), batch), expected)


@pytest.mark.parametrize("config", ALL, ids=name_of)
@pytest.mark.parametrize("padding", [float("nan"), -float("inf"), 1e30])
def test_whatever_stands_in_padding_changes_neither_loss_nor_gradient(config, padding) -> None:
    config = msgspec.structs.replace(config, kl=KlLossConfig(coef=0.1))
    loss, batch = policy_loss(config), random_batch()
    names = (
        "log_prob",
        "behavior_log_prob",
        "advantage",
        "proximal_log_prob",
        "reference_log_prob",
    )
    filled = {
        name: torch.where(batch.mask, getattr(batch, name).detach(), padding) for name in names
    }
    dirty = dataclasses.replace(
        batch, **(filled | {"log_prob": filled["log_prob"].requires_grad_()})
    )
    torch.testing.assert_close(loss(dirty)[0], loss(batch)[0], rtol=0, atol=0)
    found = gradient(loss, dirty)
    torch.testing.assert_close(found, gradient(loss, batch), rtol=0, atol=0)
    assert not found[~batch.mask].any()
    assert loss(dirty)[1].metrics() == loss(batch)[1].metrics()


@pytest.mark.parametrize("config", ALL, ids=name_of)
def test_a_fully_masked_or_empty_micro_batch_gives_zeros_and_no_metrics(config) -> None:
    loss = policy_loss(config)
    masked = random_batch(2, 4, mask=torch.zeros(2, 4, dtype=torch.bool))
    losses, diagnostics = loss(masked)
    assert not losses.any()
    assert not gradient(loss, masked).any()
    assert diagnostics.metrics() == {}
    empty = masked.rows(slice(0, 0))
    losses, diagnostics = loss(empty)
    assert losses.shape == (0, 4)
    assert diagnostics.metrics() == {}


@pytest.mark.parametrize("config", ALL, ids=name_of)
def test_only_the_current_policy_gets_a_gradient(config) -> None:
    batch = random_batch()
    names = ("behavior_log_prob", "advantage", "proximal_log_prob", "reference_log_prob")
    leaves = {name: getattr(batch, name).clone().requires_grad_() for name in names}
    config = msgspec.structs.replace(config, kl=KlLossConfig(coef=0.1))
    policy_loss(config)(dataclasses.replace(batch, **leaves))[0].sum().backward()
    assert batch.log_prob.grad is not None
    assert all(leaf.grad is None for leaf in leaves.values())


@pytest.mark.parametrize("config", ALL, ids=name_of)
def test_the_order_of_rows_does_not_matter(config) -> None:
    if config.name == "clip_cov":  # which of equally good candidates are taken follows the order
        config = PolicyLossConfig(name="clip_cov", covariance_share=1.0, covariance_low=0.0)
    batch, order = random_batch(5, 4), torch.tensor([3, 0, 4, 2, 1])
    losses, diagnostics = policy_loss(config)(batch)
    shuffled, same = policy_loss(config)(batch.rows(order))
    torch.testing.assert_close(shuffled, losses[order])
    assert same.metrics() == pytest.approx(diagnostics.metrics(), rel=1e-4, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    mode=st.sampled_from(sorted(AGGREGATIONS)),
    seed=st.integers(0, 100),
    order=st.permutations(range(6)),
    cuts=st.sets(st.integers(1, 5), max_size=4),
)
def test_the_gradient_does_not_depend_on_how_an_update_is_split(
    name, mode, seed, order, cuts
) -> None:
    """Micro-batches of random size and order.

    Whether another rank computes one makes no difference to the sum.
    """
    batch, config = random_batch(6, 4, seed=seed), PolicyLossConfig(name=name)
    if config.needs_chosen_tokens:
        batch = dataclasses.replace(batch, chosen_tokens=chosen_tokens(config, batch))
    loss, reduce = policy_loss(config), aggregation(mode)
    whole = count_denominators(batch.mask, length=20.0)
    losses, diagnostics = loss(batch)
    (expected,) = torch.autograd.grad(reduce(losses, batch.mask, whole), batch.log_prob)

    found, sums = torch.zeros_like(expected), []
    for index in torch.tensor_split(torch.tensor(order), sorted(cuts)):
        part = batch.rows(index)
        on_rank = count_denominators(part.mask, length=20.0).over_ranks(
            whole.num_tokens, whole.num_sequences
        )
        part_losses, part_diagnostics = loss(part)
        (of_part,) = torch.autograd.grad(reduce(part_losses, part.mask, on_rank), batch.log_prob)
        found += of_part
        sums.append(part_diagnostics)
    torch.testing.assert_close(found, expected)
    joined = sums[0]
    for each in sums[1:]:
        joined = joined + each
    found_metrics, expected_metrics = joined.metrics(), diagnostics.metrics()
    for metrics in (found_metrics, expected_metrics):
        metrics.pop("covariance", None)  # around the means of each micro-batch
    assert found_metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("config", ALL, ids=name_of)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_log_probs_are_computed_with_in_float32(config, half) -> None:
    exact = random_batch()
    names = (
        "log_prob",
        "behavior_log_prob",
        "proximal_log_prob",
        "reference_log_prob",
        "advantage",
    )
    rounded = {name: getattr(exact, name).detach().to(half) for name in names}
    config = msgspec.structs.replace(config, kl=KlLossConfig(coef=0.1))
    loss, leaf = policy_loss(config), rounded["log_prob"].requires_grad_()
    losses, _ = loss(dataclasses.replace(exact, **rounded))
    whole = {name: tensor.detach().float() for name, tensor in rounded.items()}
    same = dataclasses.replace(exact, **(whole | {"log_prob": whole["log_prob"].requires_grad_()}))
    torch.testing.assert_close(losses, loss(same)[0], rtol=0, atol=0)
    (found,) = torch.autograd.grad(losses.sum(), leaf)
    torch.testing.assert_close(found, gradient(loss, same).to(half), rtol=0, atol=0)


def test_longer_padding_changes_nothing_but_zeros() -> None:
    batch = random_batch(3, 4)
    wider = TokenBatch(
        log_prob=torch.nn.functional.pad(batch.log_prob, (0, 3), value=7.0),
        behavior_log_prob=torch.nn.functional.pad(batch.behavior_log_prob, (0, 3)),
        advantage=torch.nn.functional.pad(batch.advantage, (0, 3), value=5.0),
        mask=torch.nn.functional.pad(batch.mask, (0, 3)),
    )
    for name in ("ppo", "gspo", "gmpo", "sapo", "m2po", "clip_cov"):
        loss = policy_loss(PolicyLossConfig(name=name))
        torch.testing.assert_close(loss(wider)[0][:, :4], loss(batch)[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_losses_and_gradients() -> None:
    batch = random_batch()
    fields = {
        name: value.cuda() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)
    }
    on_gpu = dataclasses.replace(
        batch, **(fields | {"log_prob": batch.log_prob.detach().cuda().requires_grad_()})
    )
    for config in ALL:
        loss = policy_loss(config)
        torch.testing.assert_close(loss(on_gpu)[0].cpu(), loss(batch)[0])
        torch.testing.assert_close(gradient(loss, on_gpu).cpu(), gradient(loss, batch))
