"""The network: attention looks both ways, padding changes nothing, tokens are read one position
early.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from vla_rl.models.openvla_oft import OpenVlaOft, OpenVlaOftConfig
from vla_rl.types import Sampling

MakeObservation = Callable[..., dict[str, Any]]
INSTRUCTIONS = (
    "push",
    "turn on the stove",
    "pick up the black bowl on the stove and place it on the plate",
)


def test_a_later_token_changes_an_earlier_hidden_state(policy: OpenVlaOft) -> None:
    sequence = torch.randn(1, 10, 128, generator=torch.Generator().manual_seed(0))
    changed = sequence.clone()
    changed[0, 9] += 1.0
    lengths = torch.tensor([10])
    with torch.inference_mode():
        before, after = (
            policy.network.hidden_states(tokens, lengths) for tokens in (sequence, changed)
        )
    assert (before[0, 0] - after[0, 0]).abs().max() > 1e-4


def test_padding_changes_nothing(policy: OpenVlaOft) -> None:
    sequence = torch.randn(1, 10, 128, generator=torch.Generator().manual_seed(0))
    changed = sequence.clone()
    changed[0, 7:] += 100.0
    lengths = torch.tensor([7])
    with torch.inference_mode():
        before, after = (
            policy.network.hidden_states(tokens, lengths) for tokens in (sequence, changed)
        )
        alone = policy.network.hidden_states(sequence[:, :7], lengths)
    torch.testing.assert_close(before[:, :7], after[:, :7], atol=1e-6, rtol=0)
    torch.testing.assert_close(before[:, :7], alone, atol=1e-5, rtol=0)


def test_a_batch_of_mixed_prompts_equals_its_rows_alone(
    policy: OpenVlaOft, make_observation: MakeObservation
) -> None:
    observations = [make_observation(index, text) for index, text in enumerate(INSTRUCTIONS)]
    with torch.inference_mode():
        together = policy.network(policy.prepare(observations))
        alone = torch.cat(
            [policy.network(policy.prepare([observation])) for observation in observations]
        )
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("key", ["image", "wrist_image", "state", "instruction"])
def test_the_policy_sees_every_input(
    policy: OpenVlaOft, make_observation: MakeObservation, key: str
) -> None:
    observation, other = make_observation(0), make_observation(1, "open the top drawer")
    with torch.inference_mode():
        before = policy.network(policy.prepare([observation]))
        after = policy.network(policy.prepare([observation | {key: other[key]}]))
    assert (before - after).abs().max() > 1e-4


def test_action_tokens_are_read_one_position_before_their_placeholders(
    policy: OpenVlaOft, make_observation: MakeObservation
) -> None:
    """The whole sequence written out by hand, with the trunk's own output."""
    batch = policy.prepare([make_observation(0)])
    network, length = policy.network, int(batch.prompt_lengths[0])
    embed = network.language_model.get_input_embeddings()
    with torch.inference_mode():
        # 2 cameras x 4 patches of 14 px
        patches = network.projector(network.vision_backbone(batch.images))
        assert batch.proprio is not None
        proprio = network.proprio_projector(batch.proprio)[:, None]
        words, stop = embed(batch.prompts[:, :length]), embed(torch.tensor([[2]]))
        placeholders = torch.zeros(1, 56, 128)
        sequence = torch.cat(
            [words[:, :1], patches, proprio, words[:, 1:], placeholders, stop], dim=1
        )
        hidden = network.hidden_states(sequence, torch.tensor([sequence.shape[1]]))
        last_word = 1 + 8 + 1 + (length - 1) - 1
        read = hidden[:, last_word : last_word + 56]
        expected = (read @ network.language_model.lm_head.weight.T)[..., 768:1024]
        torch.testing.assert_close(network(batch), expected, atol=1e-5, rtol=0)


def test_features_come_from_the_second_to_last_block(
    policy: OpenVlaOft, make_observation: MakeObservation
) -> None:
    images = policy.prepare([make_observation(0)]).images
    backbone = policy.copy().network.vision_backbone
    with torch.inference_mode():
        before = backbone(images)
        for name, parameter in backbone.named_parameters():
            if ".blocks.2." in name or ".norm." in name or ".attn_pool." in name:
                parameter += 1.0
        torch.testing.assert_close(backbone(images), before, atol=0, rtol=0)
        next(
            parameter for name, parameter in backbone.named_parameters() if ".blocks.1." in name
        ).add_(1.0)
        assert not torch.equal(backbone(images), before)


def test_a_row_depends_on_its_own_seed_only(
    policy: OpenVlaOft, make_observation: MakeObservation
) -> None:
    observations = [make_observation(index, text) for index, text in enumerate(INSTRUCTIONS)]
    samplings = [Sampling(temperature=1.6, seed=index) for index in range(3)]
    with torch.inference_mode():
        together, together_log_probs = policy.sample(policy.prepare(observations), samplings)
        for row, pair in enumerate(zip(observations, samplings, strict=True)):
            tokens, log_probs = policy.sample(policy.prepare([pair[0]]), [pair[1]])
            assert torch.equal(tokens[0], together[row])
            torch.testing.assert_close(log_probs[0], together_log_probs[row], atol=1e-5, rtol=0)
        other, _ = policy.sample(
            policy.prepare(observations[:1]), [Sampling(temperature=1.6, seed=99)]
        )
    assert not torch.equal(other[0], together[0])


def test_learning_sees_the_log_probs_that_acting_reported(
    policy: OpenVlaOft, make_observation: MakeObservation
) -> None:
    observations = [make_observation(index, text) for index, text in enumerate(INSTRUCTIONS)]
    with torch.inference_mode():
        tokens, acted = policy.sample(
            policy.prepare(observations), [Sampling(temperature=1.6, seed=3)] * 3
        )
    learned, entropy = policy.log_probs(
        policy.prepare(observations), tokens.clone(), torch.full((3,), 1.6)
    )
    torch.testing.assert_close(learned.detach(), acted.clone(), atol=1e-5, rtol=0)
    assert tokens.min() >= 768
    assert tokens.max() <= 1023
    assert 0.0 < entropy.min().item() <= entropy.max().item() <= np.log(256) + 1e-5


def test_position_frequencies_stay_float32(policy: OpenVlaOft) -> None:
    frequencies = dict(policy.network.named_buffers())["language_model.model.rotary_emb.inv_freq"]
    assert frequencies.dtype is torch.float32


def test_the_same_seed_makes_the_same_weights_and_leaves_the_global_state_alone(
    config: OpenVlaOftConfig,
) -> None:
    before = torch.get_rng_state()
    one, same, other = (
        OpenVlaOft.create(config, seed=seed).checkpoint_tensors() for seed in (1, 1, 2)
    )
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_actions_have_the_shape_of_the_chunk(config: OpenVlaOftConfig) -> None:
    policy = OpenVlaOft.create(msgspec.structs.replace(config, chunk_size=3), seed=0)
    actions = policy.decode(np.full((2, 21), 800))
    assert actions.shape == (2, 3, 7)
    assert actions.dtype == np.float32
    assert policy.encode(actions).tolist() == np.full((2, 21), 800).tolist()
    with pytest.raises(ValueError, match=r"actions are \[2, 8, 7\], expected \[B, 3, 7\]"):
        policy.encode(np.zeros((2, 8, 7)))
