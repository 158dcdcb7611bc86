"""Acting by the label "Advantage: positive", and guidance away from what no label says."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from small_flow import observe, tiny_policy

from vla_rl.models.flow.advantage_prompt import drop_label, label_instruction, relabel
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.small_folder import load_small_flow
from vla_rl.models.loading import load_policy
from vla_rl.models.prismatic.conventions import CheckpointFormat
from vla_rl.types import Sampling

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
