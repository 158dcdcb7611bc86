"""The learner: gradients that do not depend on how a batch is cut, versions that are whole, skips
that are loud.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import own_parts
import pytest
import torch
from torch import Tensor

from vla_rl.algorithms import PolicyLossConfig
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.errors import ConfigError
from vla_rl.learner import (
    DivergedError,
    Learner,
    LearnerConfig,
    OptimizerConfig,
    PolicyMismatchError,
)
from vla_rl.learner.decisions import flatten_trajectories
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.types import Trajectory
from vla_rl.util.stalls import count_progress

RunPolicy = Callable[..., Trajectory]
ADVANTAGES = (1.0, -0.5, 0.25)


def batch_of(run_policy: RunPolicy, policy: OpenVlaOft) -> list[Trajectory]:
    return [run_policy(policy, seed, num_steps) for seed, num_steps in ((1, 1), (2, 4), (3, 2))]


def parameters(policy: OpenVlaOft) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in policy.network.parameters()])


def config(**changes: Any) -> LearnerConfig:
    return msgspec.structs.replace(
        LearnerConfig(optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0)), **changes
    )


def test_only_executed_control_steps_are_unmasked(
    policy: OpenVlaOft, run_policy: RunPolicy
) -> None:
    decisions = flatten_trajectories(batch_of(run_policy, policy), ADVANTAGES)
    # 2 dimensions a control step; every last chunk ended after the first of its 2 steps
    last, whole = [True, True, False, False], [True] * 4
    assert decisions.mask.tolist() == [last, whole, whole, whole, last, whole, last]
    assert decisions.sequence.tolist() == [0, 1, 1, 1, 1, 2, 2]
    assert decisions.advantage[:, 0].tolist() == [1.0, -0.5, -0.5, -0.5, -0.5, 0.25, 0.25]
    assert decisions.temperature.tolist() == pytest.approx([1.2] * 7)


def test_log_probs_are_of_the_temperature_that_acted_where_the_agent_chose_one(
    policy: OpenVlaOft, run_policy: RunPolicy
) -> None:
    trajectory = run_policy(policy, 2, 3)
    colder = msgspec.structs.replace(trajectory.steps[1].chunk, temperature=0.7)
    steps = list(trajectory.steps)
    steps[1] = msgspec.structs.replace(steps[1], chunk=colder)
    decisions = flatten_trajectories(
        [msgspec.structs.replace(trajectory, steps=tuple(steps))], [1.0]
    )
    assert decisions.temperature.tolist() == pytest.approx([1.2, 0.7, 1.2])


def test_the_tokens_of_one_control_step_are_counted_in_chunks_of_one_step_too(
    policy: OpenVlaOft, run_policy: RunPolicy
) -> None:
    trajectory = run_policy(policy, 1, 1)
    assert flatten_trajectories([trajectory], [1.0]).action_tokens == 2
    (step,) = trajectory.steps  # its four tokens as those of one control step of four dimensions
    chunk = msgspec.structs.replace(step.chunk, actions=step.chunk.actions.reshape(1, 4))
    single = msgspec.structs.replace(
        trajectory, steps=(msgspec.structs.replace(step, chunk=chunk),)
    )
    assert flatten_trajectories([single], [1.0]).action_tokens == 4


def test_advantages_may_differ_from_token_to_token(
    policy: OpenVlaOft, run_policy: RunPolicy
) -> None:
    by_token = np.arange(16.0).reshape(4, 4)
    decisions = flatten_trajectories(
        batch_of(run_policy, policy), [0.5, by_token, np.array([1.0, 2.0])]
    )
    assert decisions.advantage.tolist() == [[0.5] * 4, *by_token.tolist(), [1.0] * 4, [2.0] * 4]


def test_advantages_may_differ_from_decision_to_decision(
    policy: OpenVlaOft, run_policy: RunPolicy
) -> None:
    advantages = [0.5, np.array([1.0, 2.0, 3.0, 4.0]), -1.0]
    decisions = flatten_trajectories(batch_of(run_policy, policy), advantages)
    assert decisions.advantage[:, 0].tolist() == [0.5, 1.0, 2.0, 3.0, 4.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("advantages", "complaint"),
    [
        ((1.0, 2.0), "2 advantages for 3 trajectories"),
        (
            (1.0, np.zeros(3), 1.0),
            r"the advantage of episode 2 is \[3\], expected one number, \[4\] for its decisions, or \[4, 4\]",
        ),
        ((1.0, 1.0, float("nan")), "the advantage of episode 3 is not finite"),
    ],
)
def test_advantages_that_do_not_fit_are_refused(
    policy: OpenVlaOft, run_policy: RunPolicy, advantages: Any, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        flatten_trajectories(batch_of(run_policy, policy), advantages)


async def test_an_update_without_trajectories_is_refused(
    policy: OpenVlaOft, lane: DeviceLane
) -> None:
    async with asyncio.timeout(30):
        with pytest.raises(ValueError, match="the update has no decision"):
            await Learner(policy, lane, config()).update([], [])


async def test_the_first_update_has_ratio_one_and_agrees_with_the_engine(
    policy: OpenVlaOft, lane: DeviceLane, run_policy: RunPolicy
) -> None:
    async with asyncio.timeout(60):
        report = await Learner(policy, lane, config(micro_batch=2)).update(
            batch_of(run_policy, policy), ADVANTAGES
        )
    metrics = report.metrics
    assert report.weight_version == 1
    assert metrics["update/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["update/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["update/clip_fraction"] == 0.0
    assert metrics["update/log_prob_gap_max"] < 1e-5
    # 4 whole chunks and 3 halves
    assert (metrics["update/decisions"], metrics["update/tokens"]) == (7, 22)
    # with ratio 1 the loss is -mean of the advantages, each trajectory counted once: -(1 - 0.5 +
    # 0.25) / 3
    assert metrics["update/loss"] == pytest.approx(-0.25, abs=1e-5)


async def test_each_micro_batch_of_a_long_update_is_progress(
    policy: OpenVlaOft, lane: DeviceLane, run_policy: RunPolicy
) -> None:
    before = count_progress().get("micro-batches", 0)
    async with asyncio.timeout(60):
        await Learner(policy, lane, config(micro_batch=2)).update(
            batch_of(run_policy, policy), ADVANTAGES
        )
    assert count_progress()["micro-batches"] == before + 4  # of 7 rows


async def test_the_gradient_is_that_of_the_formula(
    policy: OpenVlaOft, lane: DeviceLane, run_policy: RunPolicy
) -> None:
    """-1/3 sum over trajectories of A / tokens * sum of log-prob gradients, as ratio is 1.

    Checked on one weight.
    """
    trajectories = batch_of(run_policy, policy)
    reference = policy.copy()
    total = torch.zeros(())
    for trajectory, advantage in zip(trajectories, ADVANTAGES, strict=True):
        tokens_run = [step.num_executed * 2 for step in trajectory.steps]
        for step, num_run in zip(trajectory.steps, tokens_run, strict=True):
            log_prob, _ = reference.log_probs(
                reference.prepare([step.observation]),
                torch.from_numpy(step.chunk.tokens)[None],
                torch.tensor([1.2]),
            )
            total = total - advantage * log_prob[0, :num_run].sum() / sum(tokens_run) / 3
    torch.autograd.backward(total)
    expected = reference.network.projector.fc2.weight.grad
    assert expected is not None
    # an optimizer of plain steps would show the gradient; Adam's first moment is a tenth of it
    learner = Learner(policy, lane, config(optimizer=OptimizerConfig(max_grad_norm=1e9)))
    async with asyncio.timeout(60):
        await learner.update(trajectories, ADVANTAGES)
        state = await learner.snapshot()
    found = state.optimizer["exp_avg/projector.fc2.weight"] * 10
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    "aggregation",
    [
        "seq_mean_token_mean",
        "token_mean",
        # as the last, but for a constant
        pytest.param("seq_mean_token_sum", marks=pytest.mark.proof),
        "seq_mean_token_sum_norm",
    ],
)
async def test_the_gradient_does_not_depend_on_the_micro_batches(
    policy: OpenVlaOft, lane: DeviceLane, run_policy: RunPolicy, aggregation: str
) -> None:
    trajectories = batch_of(run_policy, policy)
    moments = []
    async with asyncio.timeout(100):
        for micro_batch in (100, 2):  # 7 rows, of which the last is alone
            changes = config(
                micro_batch=micro_batch,
                aggregation=aggregation,
                trajectory_length=20.0 if aggregation == "seq_mean_token_sum_norm" else None,
                entropy_coef=0.01,
            )
            learner = Learner(policy.copy(), lane, changes)
            await learner.update(trajectories, ADVANTAGES)
            state = await learner.snapshot()
            moments.append(
                torch.cat(
                    [v.flatten() for k, v in state.optimizer.items() if k.startswith("exp_avg/")]
                )
            )
    for other in moments[1:]:
        torch.testing.assert_close(other, moments[0], atol=1e-7, rtol=1e-4)


async def test_masked_tokens_give_no_signal(
    policy: OpenVlaOft, lane: DeviceLane, run_policy: RunPolicy
) -> None:
    trajectories = batch_of(run_policy, policy)
    step = trajectories[0].steps[0]
    tokens = step.chunk.tokens.copy()
    tokens[2:] = 1008 + (tokens[2:] - 1008 + 5) % 16  # of the control step that did not run
    changed_step = msgspec.structs.replace(
        step, chunk=msgspec.structs.replace(step.chunk, tokens=tokens)
    )
    changed = [msgspec.structs.replace(trajectories[0], steps=(changed_step,)), *trajectories[1:]]
    one, other = policy.copy(), policy.copy()
    async with asyncio.timeout(60):
        await Learner(one, lane, config()).update(trajectories, ADVANTAGES)
        await Learner(other, lane, config()).update(changed, ADVANTAGES)
    assert torch.equal(parameters(one), parameters(other))


async def test_the_same_seed_gives_the_same_weights_to_the_last_bit(
    policy: OpenVlaOft, lane: DeviceLane, run_policy: RunPolicy
) -> None:
    results = []
    async with asyncio.timeout(100):
        for _ in range(2):
            model = policy.copy()
            learner = Learner(model, lane, config(micro_batch=3, minibatch_trajectories=2))
            for _ in range(2):
                await learner.update(batch_of(run_policy, model), ADVANTAGES)
            results.append(parameters(model))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], parameters(policy))


async def test_engines_get_weights_and_version_with_every_update(
    policy: OpenVlaOft, lane: DeviceLane, run_policy: RunPolicy
) -> None:
    actor = policy.copy()
    async with asyncio.timeout(60), TorchActionEngine(actor, lane, EngineConfig()) as engine:
        learner = Learner(policy, lane, config(minibatch_trajectories=1, epochs=2), [engine])
        report = await learner.update(batch_of(run_policy, policy), ADVANTAGES)
        assert report.weight_version == learner.weight_version == engine.weight_version == 1
        assert torch.equal(parameters(actor), parameters(policy))


async def test_an_engine_that_shares_the_model_needs_updates_of_one_step(
    policy: OpenVlaOft, lane: DeviceLane
) -> None:
    async with TorchActionEngine(policy, lane, EngineConfig()) as engine:
        Learner(policy, lane, config(), [engine])
        with pytest.raises(ConfigError, match="Give the engine a copy of the model"):
            Learner(policy, lane, config(epochs=2), [engine])


async def test_staleness_is_counted_and_stale_log_probs_are_not_compared(
    policy: OpenVlaOft, lane: DeviceLane, run_policy: RunPolicy
) -> None:
    trajectories = [
        run_policy(policy, 1, 2, weight_version=7),
        run_policy(policy, 2, 2, weight_version=4),
    ]
    stale = [run_policy(policy, 3, 1, weight_version=7)]
    async with asyncio.timeout(60):
        learner = Learner(policy, lane, config(), weight_version=7)
        first = (await learner.update(trajectories, [1.0, -1.0])).metrics
        second = (await learner.update(stale, [1.0])).metrics
    assert (first["update/staleness_mean"], first["update/staleness_max"]) == (1.5, 3.0)
    assert "update/log_prob_gap_max" in first
    assert second["update/staleness_max"] == 1.0
    assert "update/log_prob_gap_max" not in second
    # by age: what the newest weights chose has a ratio of 1, what other weights chose need not
    by_age = {
        name.rpartition("_")[2]: value for name, value in first.items() if "log_ratio_abs" in name
    }
    assert sorted(by_age) == ["0", "3"]
    assert by_age["0"] == pytest.approx(first["update/log_prob_gap_mean"])


async def test_gradients_that_are_not_finite_skip_the_step_loudly_and_then_end_the_run(
    policy: OpenVlaOft, lane: DeviceLane, run_policy: RunPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    trajectories, before = batch_of(run_policy, policy), parameters(policy)
    loss = PolicyLossConfig(name="own_parts:nan_loss")
    learner = Learner(
        policy, lane, config(optimizer=OptimizerConfig(max_skips_in_a_row=2), loss=loss)
    )
    async with asyncio.timeout(60):
        report = await learner.update(trajectories, ADVANTAGES)
        assert report.metrics["update/skipped_steps"] == 1.0
        assert report.weight_version == 1  # whoever is paced by versions goes on
        assert "optimizer step 1 skipped" in caplog.text
        with pytest.raises(DivergedError, match="2 optimizer steps in a row"):
            await learner.update(trajectories, ADVANTAGES)
    assert torch.equal(parameters(policy), before)


async def test_a_cancelled_update_leaves_no_gradient_behind(
    policy: OpenVlaOft, lane: DeviceLane, run_policy: RunPolicy
) -> None:
    trajectories = batch_of(run_policy, policy)
    undisturbed = policy.copy()
    async with asyncio.timeout(60):
        await Learner(undisturbed, lane, config(micro_batch=1)).update(trajectories, ADVANTAGES)
        loss = PolicyLossConfig(name="own_parts:second_micro_batch_waits")
        learner = Learner(policy, lane, config(micro_batch=1, loss=loss))
        doomed = asyncio.create_task(learner.update(trajectories, ADVANTAGES))
        await asyncio.to_thread(own_parts.reached.wait, 30)
        assert policy.network.projector.fc1.weight.grad is not None
        doomed.cancel()
        own_parts.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        assert learner.weight_version == 0
        await learner.update(trajectories, ADVANTAGES)
    assert torch.equal(parameters(policy), parameters(undisturbed))


async def test_a_restored_learner_goes_on_as_if_nothing_had_happened(
    policy: OpenVlaOft, lane: DeviceLane, run_policy: RunPolicy
) -> None:
    trajectories = batch_of(run_policy, policy)
    twin = OpenVlaOft.create(policy.config, seed=99)
    async with asyncio.timeout(100):
        learner = Learner(policy, lane, config(minibatch_trajectories=2))
        await learner.update(trajectories, ADVANTAGES)
        state = await learner.snapshot()
        await learner.update(trajectories, ADVANTAGES)
        other = Learner(twin, lane, config(minibatch_trajectories=2))
        await other.restore(state)
        assert other.weight_version == 1
        await other.update(trajectories, ADVANTAGES)
    assert torch.equal(parameters(policy), parameters(twin))


def _parameters_and_moments(policy: OpenVlaOft, learner_state: Any) -> tuple[Tensor, Tensor]:
    moments = [v.flatten() for k, v in learner_state.optimizer.items() if k.startswith("exp_avg/")]
    return parameters(policy), torch.cat(moments)


async def test_an_update_that_gives_no_signal_moves_neither_weights_nor_momentum(
    policy: OpenVlaOft, lane: DeviceLane, run_policy: RunPolicy
) -> None:
    async with asyncio.timeout(60):
        learner = Learner(policy, lane, config())
        await learner.update(batch_of(run_policy, policy), ADVANTAGES)
        before = _parameters_and_moments(policy, await learner.snapshot())
        report = await learner.update(batch_of(run_policy, policy), [0.0, 0.0, 0.0])
        after = _parameters_and_moments(policy, await learner.snapshot())
    assert (report.weight_version, report.metrics["update/trained"]) == (2, 0.0)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("name", ["ppo", "gspo", "gmpo", "decoupled_ppo", "cispo"])
# in the suite: two epochs, the first of which is that of one
@pytest.mark.parametrize("epochs", [pytest.param(1, marks=pytest.mark.proof), 2])
async def test_rows_without_an_advantage_are_not_computed_and_the_weights_learn_the_same(
    policy: OpenVlaOft, lane: DeviceLane, run_policy: RunPolicy, name: str, epochs: int
) -> None:
    trajectories, advantages = (
        batch_of(run_policy, policy),
        (1.0, 0.0, -0.5),
    )  # of 1, 4 and 2 decisions
    settings = config(loss=PolicyLossConfig(name=name), epochs=epochs, micro_batch=2)
    twin = policy.copy()
    async with asyncio.timeout(60):
        report = await Learner(policy, lane, settings).update(trajectories, advantages)
        # a bonus too small to move a weight, for which every row is computed
        every_row = msgspec.structs.replace(settings, entropy_coef=1e-30)
        whole = await Learner(twin, lane, every_row).update(trajectories, advantages)
    assert report.metrics["update/computed_rows"] == 3.0 * epochs
    assert whole.metrics["update/computed_rows"] == 7.0 * epochs
    assert report.metrics["update/rows"] == whole.metrics["update/rows"] == 7.0
    assert report.metrics["update/loss"] == pytest.approx(whole.metrics["update/loss"], abs=1e-7)
    assert report.metrics["update/grad_norm"] == pytest.approx(whole.metrics["update/grad_norm"])
    torch.testing.assert_close(parameters(policy), parameters(twin), rtol=0, atol=2e-5)


async def test_a_loss_that_chooses_among_all_tokens_is_given_every_row(
    policy: OpenVlaOft, lane: DeviceLane, run_policy: RunPolicy
) -> None:
    learner = Learner(policy, lane, config(loss=PolicyLossConfig(name="clip_cov")))
    async with asyncio.timeout(60):
        report = await learner.update(batch_of(run_policy, policy), (1.0, 0.0, -0.5))
    assert report.metrics["update/computed_rows"] == 7.0


@pytest.mark.parametrize(
    ("name", "trained_tokens"),
    [("dppo", True), ("cpgd", True), ("kl_cov", True), ("ppo", False), ("cispo", False)],
)
async def test_without_advantages_older_weights_train_where_the_loss_has_a_term_of_its_own(
    policy: OpenVlaOft, lane: DeviceLane, run_policy: RunPolicy, name: str, trained_tokens: bool
) -> None:
    trajectories = batch_of(run_policy, policy)
    async with asyncio.timeout(60):
        learner = Learner(policy, lane, config(loss=PolicyLossConfig(name=name)))
        await learner.update(trajectories, ADVANTAGES)
        report = await learner.update(trajectories, [0.0, 0.0, 0.0])
    assert (report.metrics["update/trained"] > 0.0) is trained_tokens
    assert (report.metrics.get("update/grad_norm", 0.0) > 0.0) is trained_tokens


async def test_an_advantage_on_masked_tokens_alone_gives_no_signal(
    policy: OpenVlaOft, lane: DeviceLane, run_policy: RunPolicy
) -> None:
    # the chunk ended after its first control step, two of four tokens
    after_the_end = np.array([[0.0, 0.0, 3.0, 3.0]])
    before = parameters(policy)
    async with asyncio.timeout(60):
        report = await Learner(policy, lane, config()).update(
            [run_policy(policy, 1, 1)], [after_the_end]
        )
    assert report.metrics["update/trained"] == 0.0
    assert torch.equal(parameters(policy), before)


async def test_a_first_ratio_that_is_not_one_ends_the_run_before_the_weights_move(
    policy: OpenVlaOft, lane: DeviceLane, run_policy: RunPolicy
) -> None:
    trajectories = batch_of(run_policy, policy)
    step = trajectories[0].steps[0]
    lied = msgspec.structs.replace(
        step, chunk=msgspec.structs.replace(step.chunk, log_probs=step.chunk.log_probs - 3.0)
    )
    # two of 22 tokens are off by 3: 6 / 22 on average
    wrong = [msgspec.structs.replace(trajectories[0], steps=(lied,)), *trajectories[1:]]
    before = parameters(policy)
    learner = Learner(policy, lane, config())
    async with asyncio.timeout(60):
        with pytest.raises(PolicyMismatchError, match=r"differ by 0\.2727 on average"):
            await learner.update(wrong, ADVANTAGES)
    assert learner.weight_version == 0
    assert torch.equal(parameters(policy), before)


async def test_only_the_first_update_is_held_to_ratio_one(
    policy: OpenVlaOft, lane: DeviceLane, run_policy: RunPolicy
) -> None:
    learner = Learner(policy, lane, config(max_mismatch=1e-3))
    async with asyncio.timeout(60):
        await learner.update(batch_of(run_policy, policy), ADVANTAGES)
        # these say that version 1 acted, but they were sampled before it
        stale = [run_policy(OpenVlaOft.create(policy.config, seed=5), 4, 2, weight_version=1)]
        report = await learner.update(stale, [1.0])
    assert report.metrics["update/log_prob_gap_mean"] > 1e-3
