"""Chains that are guided: by the label "Advantage: positive", by the plan of a robot that moved on while the
policy decided."""

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from small_flow import TINY, observe, tiny_policy
from torch import Tensor

from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.models.flow.advantage_prompt import drop_label, label_instruction, relabel
from vla_rl.models.flow.config import FlowSampling
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.real_time import guidance_weight, run_guided_chain, weigh_plan
from vla_rl.models.flow.sampler import Draws, run_chain
from vla_rl.models.flow.small_folder import create_small_flow, load_small_flow
from vla_rl.models.flow.transitions import Schedule
from vla_rl.models.loading import load_policy
from vla_rl.models.prismatic.conventions import CheckpointFormat
from vla_rl.types import Sampling, with_drawn, with_plan

GREEDY = [Sampling(seed=number, greedy=True) for number in range(4)]
SEEN = [observe(number) for number in range(4)]


def guided(policy: FlowPolicy, guidance: float | None) -> FlowPolicy:
    return policy.with_sampling(
        msgspec.structs.replace(policy.config.sampling, advantage_guidance=guidance)
    )


def ends(policy: FlowPolicy, observations: list[Any]) -> torch.Tensor:
    with torch.inference_mode():
        return policy.sample(policy.prepare(observations), GREEDY).tokens


def test_a_label_is_put_at_the_end_and_taken_off_again() -> None:
    labelled = label_instruction("push the plate", True)
    assert labelled == "push the plate Advantage: positive"
    assert label_instruction(labelled, False) == "push the plate Advantage: negative"
    assert drop_label(labelled) == drop_label("push the plate") == "push the plate"
    assert relabel({"instruction": labelled, "state": 1}, None) == {
        "instruction": "push the plate",
        "state": 1,
    }


def test_a_guidance_of_one_acts_as_on_an_instruction_with_the_label() -> None:
    policy = tiny_policy()
    labelled = [relabel(each, True) for each in SEEN]
    expected = ends(policy, labelled)
    assert not torch.equal(expected, ends(policy, SEEN))
    assert torch.equal(ends(guided(policy, 1.0), SEEN), expected)
    # a label that the data brought with them is not doubled
    assert torch.equal(ends(guided(policy, 1.0), labelled), expected)


def test_a_guided_velocity_goes_further_in_the_direction_of_the_label() -> None:
    policy = guided(tiny_policy(num_steps=1), 3.0)
    positive, plain = (
        ends(guided(policy, None), [relabel(each, label) for each in SEEN])
        for label in (True, None)
    )
    # one step from the same noise: what the chain ends in is linear in the velocity
    torch.testing.assert_close(ends(policy, SEEN), plain + 3.0 * (positive - plain))


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_a_guided_decision_is_scored_as_it_was_drawn(guidance: float) -> None:
    policy = guided(tiny_policy(), guidance)
    samplings = [Sampling(seed=number) for number in range(4)]
    with torch.inference_mode():
        drawn = policy.sample(policy.prepare(SEEN), samplings)
        assert drawn.drawn is not None
        stored = [
            {**each, "drawn": {name: value[row].numpy() for name, value in drawn.drawn.items()}}
            for row, each in enumerate(SEEN)
        ]
        scored, _ = policy.log_probs(policy.prepare(stored), drawn.tokens, torch.ones(4))
    torch.testing.assert_close(scored, drawn.log_probs, rtol=1e-4, atol=1e-4)


def test_equal_observations_are_read_once_and_guided_alike() -> None:
    policy = guided(tiny_policy(), 2.0)
    inputs = policy.prepare([SEEN[0]] * 4)
    assert inputs.plain is not None
    assert len(inputs.images) == len(inputs.plain.images) == 1
    alone = policy.prepare([SEEN[0]])
    with torch.inference_mode():
        together = policy.sample(inputs, GREEDY).tokens
        torch.testing.assert_close(together[:1], policy.sample(alone, GREEDY[:1]).tokens)


def test_a_folder_keeps_the_guidance_and_an_option_changes_it(tmp_path: Path) -> None:
    guided(tiny_policy(), 1.5).save(tmp_path / "policy")
    assert load_small_flow(tmp_path / "policy").config.sampling.advantage_guidance == 1.5
    format = CheckpointFormat(flow_guidance=2.5)
    policy = load_policy(str(tmp_path / "policy"), format, "cpu")
    assert isinstance(policy, FlowPolicy)
    assert policy.config.sampling.advantage_guidance == 2.5
    assert policy.copy().config.sampling.advantage_guidance == 2.5


def test_a_guidance_below_one_is_refused() -> None:
    with pytest.raises(Exception, match="flow_guidance"):
        msgspec.convert({"flow_guidance": 0.5}, CheckpointFormat)


HORIZON, DELAY, LEFT = 16, 4, 10
SCHEDULE = Schedule("ode", 10)
SIDE = torch.ones(HORIZON, 1)


def turn_left_or_right(x: Tensor, time: Tensor) -> Tensor:
    """Return the exact velocity of a policy that passes an obstacle on either side, alike often."""
    t = time[:, None, None]
    spread = t.square() + ((1.0 - t) * 0.05).square()
    ways = torch.stack([SIDE, -SIDE])
    distance = x[None] - (1.0 - t) * ways[:, None]
    share = (-0.5 * (distance.square() / spread).sum((2, 3))).softmax(0)[..., None, None]
    action = ways[:, None] + (1.0 - t) * 0.05**2 / spread * distance
    noise = t / spread * distance
    return (share * (noise - action)).sum(0)


def draw(num: int) -> Draws:
    return Draws.from_seeds(
        [Sampling(seed=seed, greedy=True) for seed in range(num)], (HORIZON, 1), SCHEDULE
    )


def plan_of(chunks: Tensor, executed: int) -> Tensor:
    """Return what is left of chunks, padded with zeros."""
    return torch.nn.functional.pad(chunks[:, executed:], (0, 0, 0, executed))


def test_under_a_delay_of_four_steps_the_motion_goes_on_where_naive_switching_jumps() -> None:
    draws = draw(64)
    chunks = run_chain(turn_left_or_right, draws, SCHEDULE).chunk
    # chunks of other noise: half of them pass the obstacle on the other side
    plan = plan_of(chunks.roll(1, 0), HORIZON - LEFT)
    weight = torch.from_numpy(weigh_plan(LEFT, DELAY, HORIZON))[None, :, None].expand_as(plan)
    guided = run_guided_chain(turn_left_or_right, draws.noise, SCHEDULE, plan, weight)

    def largest_jump(chunk: Tensor) -> Tensor:
        """Return how far the first new row is from what was planned for it."""
        return (chunk[:, DELAY] - plan[:, DELAY]).abs().amax(1)

    naive, found = largest_jump(chunks), largest_jump(guided)
    assert float((naive > 0.5).float().mean()) > 0.4
    assert float((found > 0.5).float().mean()) < 0.05
    assert float(found.median()) < 0.05
    assert torch.equal(guided[:, :DELAY], plan[:, :DELAY])
    # the end passes on the same side, although nothing but the policy ties it to the plan
    is_same_side = guided[:, -1].sign() == plan[:, DELAY].sign()
    assert float(is_same_side.float().mean()) > 0.95


def test_a_chain_without_a_plan_is_the_plain_chain() -> None:
    draws = draw(8)
    plain = run_chain(turn_left_or_right, draws, SCHEDULE).chunk
    nothing = torch.zeros_like(plain)
    found = run_guided_chain(turn_left_or_right, draws.noise, SCHEDULE, nothing, nothing)
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=0.0)


def test_weights_are_those_of_the_paper() -> None:
    weights = weigh_plan(num_rows=LEFT, delay=DELAY, horizon=HORIZON)
    assert weights[:DELAY].tolist() == [1.0] * DELAY
    assert (weights[LEFT:] == 0.0).all()
    guided = weights[DELAY:LEFT]
    assert (np.diff(guided) < 0.0).all()
    assert guided.min() > 0.0
    assert guided.max() < 1.0
    share = 6 / 7
    assert guided[0] == pytest.approx(share * (math.exp(share) - 1.0) / (math.e - 1.0), rel=1e-6)
    assert guidance_weight(1.0) == 5.0
    assert guidance_weight(0.5) == 2.0


@pytest.fixture
def policy() -> FlowPolicy:
    """A policy with chunks of 16 rows, whose velocity depends on all its inputs."""
    config = msgspec.structs.replace(TINY, horizon=HORIZON)
    policy = create_small_flow(config, 0, FlowSampling(num_steps=5))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


def jump_of(actions: np.ndarray, planned: np.ndarray) -> float:
    return float(np.abs(actions[DELAY] - planned[DELAY]).max())


async def test_the_engine_gives_a_chunk_that_continues_the_plan(
    policy: FlowPolicy, lane: DeviceLane
) -> None:
    async with TorchActionEngine(policy, lane, EngineConfig()) as engine:
        first = await engine.act(observe(0), Sampling(greedy=True, seed=1))
        planned = first.actions[HORIZON - LEFT :]
        naive = await engine.act(observe(1), Sampling(greedy=True, seed=2))
        seen = with_plan(observe(1), planned, DELAY)
        guided = await engine.act(seen, Sampling(greedy=True, seed=2))
    np.testing.assert_allclose(guided.actions[:DELAY], planned[:DELAY], atol=1e-6)
    assert jump_of(guided.actions, planned) < 0.3 * jump_of(naive.actions, planned)
    assert np.abs(guided.actions[LEFT:] - naive.actions[LEFT:]).max() > 0.0


async def test_decisions_with_and_without_a_plan_share_a_batch(policy: FlowPolicy) -> None:
    seen = [observe(seed) for seed in range(3)]
    samplings = [Sampling(seed=seed) for seed in range(3)]
    planned = np.zeros((LEFT, 3), np.float32)
    mixed = [seen[0], with_plan(seen[1], planned, DELAY), seen[2]]
    with torch.inference_mode():
        plain = policy.sample(policy.prepare(seen), samplings)
        found = policy.sample(policy.prepare(mixed), samplings)
    assert plain.chunk is not None
    assert found.chunk is not None
    for row in (0, 2):
        assert torch.equal(found.tokens[row], plain.tokens[row])
        assert torch.equal(found.log_probs[row], plain.log_probs[row])
    assert not torch.equal(found.chunk[1], plain.chunk[1])
    assert found.log_probs[1].abs().sum() == 0.0
    drawn = {name: values[1].numpy() for name, values in found.drawn.items()}
    with pytest.raises(ValueError, match="or one that continues a plan"):
        policy.check_drawn(drawn)


@pytest.mark.parametrize(
    ("planned", "delay", "words"),
    [
        (np.zeros((3, 3), np.float32), 4, r"is 4, expected 0 to 3, the rows of the plan"),
        (np.zeros((4, 2), np.float32), 1, r"is \[4, 2\], expected finite actions \[1 to 16, 3\]"),
        (np.zeros((17, 3), np.float32), 1, r"expected finite actions \[1 to 16, 3\]"),
        (np.full((4, 3), np.nan, np.float32), 1, "expected finite actions"),
        (np.zeros((4, 3), np.float32), 1.5, "whole number of control steps"),
        (np.zeros((4, 3), np.float32), "1", "whole number of control steps"),
    ],
    ids=["short", "narrow", "long", "nan", "half", "text"],
)
def test_an_impossible_plan_is_refused(
    planned: np.ndarray, delay: Any, words: str, policy: FlowPolicy
) -> None:
    with pytest.raises(ValueError, match=words):
        policy.prepare([with_plan(observe(0), planned, delay)])


def test_keys_of_the_plan_are_kept_for_it(policy: FlowPolicy) -> None:
    planned = np.zeros((4, 3), np.float32)
    twice = with_plan(observe(0), planned, 2)
    with pytest.raises(ValueError, match="kept for a robot's plan"):
        with_plan(twice, planned, 2)
    with pytest.raises(ValueError, match=r"observation\['planned_actions'\] is NoneType"):
        policy.prepare([{**observe(0), "delay": 2}])


def test_a_stored_decision_may_have_had_a_plan_in_its_observation(policy: FlowPolicy) -> None:
    """Scoring reads what was drawn: a plan beside it changes no density."""
    with torch.inference_mode():
        found = policy.sample(policy.prepare([observe(0)]), [Sampling(seed=0)])
    row = with_drawn(observe(0), {name: each[0].numpy() for name, each in found.drawn.items()})
    planned = with_plan(row, np.zeros((LEFT, 3), np.float32), DELAY)
    ones = torch.ones(1)
    plain = policy.log_probs(policy.prepare([row]), found.tokens.clone(), ones)[0]
    assert torch.equal(
        policy.log_probs(policy.prepare([planned]), found.tokens.clone(), ones)[0], plain
    )
