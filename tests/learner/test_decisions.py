"""Turns of a conversation as rows of an update: joined where they fit exactly, apart where not, and
the same gradient.
"""

from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.conversations import SHAPE, broken, chat, episode, turn
from vla_rl.algorithms import PolicyLossConfig
from vla_rl.algorithms.losses import TokenBatch
from vla_rl.engines import DeviceLane
from vla_rl.engines.policy_model import NO_TOKEN
from vla_rl.learner import Critic, CriticConfig, Learner, LearnerConfig, OptimizerConfig, Reference
from vla_rl.learner.decisions import flatten_trajectories
from vla_rl.learner.rows import BY_ROW, RECORDED, Row, TokenColumns, narrowed
from vla_rl.models.language import CausalLanguageModel, tiny
from vla_rl.types import StopReason


@pytest.fixture
def policy() -> CausalLanguageModel:
    return tiny(SHAPE, ["a"], seed=0)


def test_turns_that_continue_each_other_exactly_become_one_row(policy: CausalLanguageModel) -> None:
    rows = flatten_trajectories([chat(policy)], [np.array([1.0, -2.0])])
    assert len(rows) == 1
    assert rows.num_decisions == 2
    assert rows.observations[0]["prompt_tokens"].tolist() == [5, 6, 7]
    assert rows.tokens.tolist() == [[20, 21, 8, 9, 22, 23, 24]]
    assert rows.mask.tolist() == [[True, True, False, False, True, True, True]]
    assert rows.advantage.tolist() == [[1.0, 1.0, 0.0, 0.0, -2.0, -2.0, -2.0]]
    assert rows.num_input_tokens.tolist() == [10]


def test_turns_that_write_the_past_in_another_way_stay_apart(policy: CausalLanguageModel) -> None:
    rows = flatten_trajectories([broken(policy)], [1.0])
    assert rows.tokens.tolist() == [[20, 21, NO_TOKEN], [22, 23, 24]]
    assert rows.mask.tolist() == [[True, True, False], [True, True, True]]
    assert rows.sequence.tolist() == [0, 0]


def test_turns_at_different_temperatures_stay_apart(policy: CausalLanguageModel) -> None:
    trajectory = chat(policy)
    first, second = trajectory.steps
    colder = msgspec.structs.replace(
        second, chunk=msgspec.structs.replace(second.chunk, temperature=0.5)
    )
    decisions = flatten_trajectories(
        [msgspec.structs.replace(trajectory, steps=(first, colder))], [1.0]
    )
    assert decisions.num_tokens.tolist() == [2, 3]
    assert decisions.temperature.tolist() == [1.0, 0.5]
    assert decisions.action_tokens == 1


def test_agents_that_speak_in_turns_have_rows_of_their_own(policy: CausalLanguageModel) -> None:
    made = episode(
        0,
        turn(policy, [5], [20], agent="solver"),
        turn(policy, [6], [30], agent="checker"),
        turn(policy, [5, 20, 7], [21], agent="solver"),
    )
    rows = flatten_trajectories([made], [np.array([1.0, 2.0, 3.0])])
    assert rows.tokens.tolist() == [[20, 7, 21], [30, NO_TOKEN, NO_TOKEN]]
    assert rows.advantage.tolist() == [[1.0, 0.0, 3.0], [2.0, 0.0, 0.0]]
    values = torch.tensor([[1.0, 0.0, 3.0], [2.0, 0.0, 0.0]])
    assert [part.tolist() for part in rows.split_by_decision(values)] == [[1.0], [2.0], [3.0]]


def test_each_token_keeps_the_version_that_chose_it(policy: CausalLanguageModel) -> None:
    made = episode(0, turn(policy, [5], [20, 21, 22], versions=[3, 3, 4]))
    assert flatten_trajectories([made], [1.0]).weight_version.tolist() == [[3, 3, 4]]
    same = episode(0, turn(policy, [5], [20, 21, 22], versions=[3, 3, 3]))
    assert flatten_trajectories([same], [1.0]).weight_version.tolist() == [[3]]


async def gradients_of(
    lane: DeviceLane, config: LearnerConfig, joins: bool
) -> tuple[dict[str, float], torch.Tensor]:
    policy = tiny(SHAPE, ["a"], seed=0)
    make = chat if joins else broken
    trajectories = [make(policy, 0), episode(1, turn(policy, [9, 9], [25])), make(policy, 2)]
    report = await Learner(policy, lane, config).update(trajectories, [1.0, -0.5, 0.25])
    return report.metrics, torch.cat(
        [parameter.detach().flatten() for parameter in policy.network.parameters()]
    )


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
async def test_the_update_is_the_same_however_rows_are_put_together(
    lane: DeviceLane, aggregation: str
) -> None:
    results = []
    for limits in (
        {"micro_batch": 32},
        {"micro_batch": 1},
        {"micro_batch_tokens": 12},
        {"micro_batch_tokens": 1},
    ):
        config = LearnerConfig(
            optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0),
            aggregation=aggregation,  # type: ignore[arg-type]
            **limits,  # type: ignore[arg-type]
        )
        results.append(await gradients_of(lane, config, joins=True))
    for metrics, weights in results[1:]:
        assert metrics["update/loss"] == pytest.approx(results[0][0]["update/loss"], abs=1e-5)
        torch.testing.assert_close(weights, results[0][1], rtol=0.0, atol=2e-5)
    assert results[0][0]["update/decisions"] == 5.0
    assert results[0][0]["update/rows"] == 3.0
    assert results[0][0]["update/log_prob_gap_max"] < 1e-4


@pytest.mark.parametrize("loss", ["gspo", "cpgd", "ppo"])
async def test_sequence_losses_see_a_whole_episode_in_several_rows(
    lane: DeviceLane, loss: str
) -> None:
    config = LearnerConfig(loss=PolicyLossConfig(name=loss), micro_batch=1)
    metrics, _ = await gradients_of(lane, config, joins=False)
    assert metrics["update/rows"] == 5.0
    assert np.isfinite(metrics["update/loss"])


async def test_a_reference_answers_by_decision_whatever_the_rows(
    policy: CausalLanguageModel, lane: DeviceLane
) -> None:
    reference = Reference(policy, lane, micro_batch=8, micro_batch_tokens=12)
    trajectories = [chat(policy, 0), broken(policy, 1)]
    for trajectory, found in zip(
        trajectories, await reference.log_probs(trajectories), strict=True
    ):
        for step, log_probs in zip(trajectory.steps, found, strict=True):
            np.testing.assert_allclose(log_probs, step.chunk.log_probs, atol=1e-4)
    joined = flatten_trajectories(trajectories, [1.0, 1.0], await reference.log_probs(trajectories))
    assert joined.reference_log_prob is not None
    gap = torch.where(joined.mask, joined.reference_log_prob - joined.behavior_log_prob, 0.0)
    assert float(gap.abs().max()) < 1e-4


async def test_a_critic_values_every_turn_and_what_was_cut_off(
    policy: CausalLanguageModel, lane: DeviceLane
) -> None:
    critic = Critic(policy, lane, CriticConfig(micro_batch_tokens=9), seed=0)
    cut_off = episode(1, turn(policy, [9, 9], [25]), stop_reason=StopReason.TOKEN_LIMIT)
    trajectories = [chat(policy, 0), cut_off]
    returns = [np.array([0.5, 1.0], np.float32), np.array([0.0], np.float32)]
    for _ in range(30):
        estimated = await critic.values(trajectories)
        await critic.fit_values(trajectories, estimated, returns)
    estimated = await critic.values(trajectories)
    assert [len(each.values) for each in estimated] == [2, 1]
    assert estimated[0].bootstrap == 0.0
    assert estimated[1].bootstrap != 0.0
    np.testing.assert_allclose(
        np.concatenate([each.values for each in estimated]), [0.5, 1.0, 0.0], atol=0.2
    )


def test_rows_that_share_a_line_are_read_as_if_alone(policy: CausalLanguageModel) -> None:
    prompts = [np.arange(1, 1 + length) for length in (15, 3, 5, 4)]
    replies = [[21, 22, 23], [24], [25, 26], [27, 28, 29]]
    tokens = torch.tensor([reply + [NO_TOKEN] * (3 - len(reply)) for reply in replies])
    read: list[tuple[int, ...]] = []
    network: Any = policy.network
    hook = network.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    with hook, torch.no_grad():
        together, entropies = policy.log_probs(
            policy.prepare([{"prompt_tokens": prompt} for prompt in prompts]), tokens, torch.ones(4)
        )
        features = policy.features(
            policy.prepare([{"prompt_tokens": prompt} for prompt in prompts])
        )
        assert read == [(1, 36), (1, 27)]  # 18, 4, 7 and 7 end to end; and the prompts alone
        for row, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
            batch, length = policy.prepare([{"prompt_tokens": prompt}]), len(reply)
            alone, entropy = policy.log_probs(batch, torch.tensor([reply]), torch.ones(1))
            torch.testing.assert_close(together[row, :length], alone[0])
            torch.testing.assert_close(entropies[row, :length], entropy[0])
            torch.testing.assert_close(features[row], policy.features(batch)[0])


def test_every_input_of_a_loss_is_a_column() -> None:
    computed_by_the_loss = {"log_prob", "sampler_log_prob"}
    # computed by a flow policy's `predict` in the pass, from what was drawn
    computed_by_the_loss |= {
        *("prediction", "behavior_prediction", "step_std", "velocity_weight", "reached"),
        "behavior_velocity",
    }
    inputs = {each.name for each in fields(TokenBatch)} - computed_by_the_loss
    assert inputs <= {each.name for each in fields(TokenColumns)}


def test_tokens_without_numbers_get_the_fill_value_of_every_column() -> None:
    row = Row({}, sequence=0, temperature=1.0)
    row.add_tokens(np.array([7, 8]))
    assert {name: row.parts[name][0].tolist() for name in RECORDED} == {
        name: [7, 8] if name == "tokens" else [column.fill] * 2 for name, column in RECORDED.items()
    }
    assert all(hasattr(row, name) for name in BY_ROW)


def test_a_column_with_one_number_for_the_chosen_tokens_of_each_row_is_kept_narrow() -> None:
    mask = torch.tensor([[True, True, False], [False, True, True]])
    column = torch.tensor([[3.0, 3.0, 9.0], [9.0, -1.0, -1.0]])
    assert narrowed(column, mask).tolist() == [[3.0], [-1.0]]
    assert narrowed(column, torch.ones_like(mask)) is column
    assert narrowed(column.long(), mask).tolist() == [[3], [-1]]
