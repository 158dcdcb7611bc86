"""The network: attention looks both ways, padding changes nothing, tokens are read one position early.

Only the action tokens' rows of the head are computed, decisions on the same observation pass through
the network once, and a demonstrated bin trains its neighbours a little.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from made_inputs import shallow
from storage_bytes import StorageBytes
from torch import Tensor

from vla_rl.engines import DeviceLane
from vla_rl.errors import ConfigError
from vla_rl.learner import Demonstration, ImitationConfig, Imitator, OptimizerConfig
from vla_rl.learner.imitation_backend import make_sft_log_probs
from vla_rl.models.example_inputs import example_row
from vla_rl.models.mlp import MlpPolicy
from vla_rl.models.openvla_oft import OpenVlaOft, OpenVlaOftConfig
from vla_rl.models.prismatic.config import LoraConfig, tiny
from vla_rl.models.prismatic.processor import PrismaticBatch
from vla_rl.types import Observation, Sampling

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
        sampled = policy.sample(policy.prepare(observations), samplings)
        together, together_log_probs = sampled.tokens, sampled.log_probs
        for row, pair in enumerate(zip(observations, samplings, strict=True)):
            sampled = policy.sample(policy.prepare([pair[0]]), [pair[1]])
            tokens, log_probs = sampled.tokens, sampled.log_probs
            assert torch.equal(tokens[0], together[row])
            torch.testing.assert_close(log_probs[0], together_log_probs[row], atol=1e-5, rtol=0)
        other = policy.sample(
            policy.prepare(observations[:1]), [Sampling(temperature=1.6, seed=99)]
        ).tokens
    assert not torch.equal(other[0], together[0])


def test_learning_sees_the_log_probs_that_acting_reported(
    policy: OpenVlaOft, make_observation: MakeObservation
) -> None:
    observations = [make_observation(index, text) for index, text in enumerate(INSTRUCTIONS)]
    with torch.inference_mode():
        sampled = policy.sample(
            policy.prepare(observations), [Sampling(temperature=1.6, seed=3)] * 3
        )
        tokens, acted = sampled.tokens, sampled.log_probs
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


def batch_of(policy: OpenVlaOft) -> PrismaticBatch:
    row = example_row(policy)
    assert row is not None
    return row.batch


def peak_bytes(config: OpenVlaOftConfig, vocab_size: int) -> int:
    """Return the most bytes of an update and a decision, without the head, the table of embeddings,
    and their gradients."""
    llm = msgspec.structs.replace(config.llm, vocab_size=vocab_size)
    policy = OpenVlaOft.create(msgspec.structs.replace(config, llm=llm), seed=0)
    trunk = policy.network.language_model
    for table in (trunk.lm_head, trunk.get_input_embeddings()):
        table.requires_grad_(False)
    batch = batch_of(policy)
    tokens = torch.full((1, config.num_action_tokens), vocab_size - 1)
    with StorageBytes() as memory:
        torch.autograd.backward(policy.log_probs(batch, tokens, torch.ones(1))[0].sum())
        with torch.no_grad():
            policy.sample(batch, [Sampling(seed=0)])
    # a view of the head's rows shares the whole head's storage
    return memory.most - trunk.lm_head.weight.nbytes


def test_memory_does_not_grow_with_the_vocabulary(config: OpenVlaOftConfig) -> None:
    small, large = (peak_bytes(config, size) for size in (1024, 32_000))
    of_all_logits = 4 * config.num_action_tokens * (32_000 - 1024)
    assert abs(large - small) < 0.001 * of_all_logits


@pytest.mark.parametrize("rank", [None, 2])
def test_log_probs_and_gradients_are_those_of_the_whole_heads_action_rows(
    policy: OpenVlaOft, rank: int | None
) -> None:
    if rank is not None:
        policy = policy.adapted(LoraConfig(rank=rank), seed=0)
    network, batch = policy.network, batch_of(policy)
    tokens = torch.arange(768, 1024)[None, : policy.config.num_action_tokens]

    def whole() -> Tensor:
        logits = network.language_model.lm_head(network.compute_trunk(batch))[..., 768:1024]
        return logits.float().log_softmax(-1).gather(-1, tokens[..., None] - 768)[..., 0]

    trained = [each for each in network.parameters() if each.requires_grad]
    expected, found = whole(), policy.log_probs(batch, tokens, torch.ones(1))[0]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    grads = [
        torch.autograd.grad(each.sum(), trained, allow_unused=True) for each in (found, expected)
    ]
    for ours, theirs in zip(*grads, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            # a float32 sum rounds by its largest terms, in another order on each CPU
            atol = 3e-6 * max(float(theirs.abs().max()), 1e-3)
            torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


def small_policy() -> OpenVlaOft:
    shape = tiny(image_size=28, cameras=("image",), proprio=None, chunk_size=1, action_dim=2)
    return OpenVlaOft.create(shallow(shape), seed=0)


def make_batch() -> Observation:
    return {"image": np.full((28, 28, 3), 90, np.uint8), "instruction": "turn left"}


def test_the_bins_around_a_token_are_weighed_by_a_gaussian() -> None:
    policy, middle = small_policy(), np.full((1, 1, 2), 0.0)
    tokens, batch = torch.from_numpy(policy.encode(middle)), policy.prepare([make_batch()])
    away = torch.arange(-8, 9)
    weights = torch.exp(-0.5 * (away / 1.5) ** 2)
    weights /= weights.sum()
    with torch.no_grad():
        each = [policy.log_probs(batch, tokens + int(step), torch.ones(1))[0] for step in away]
        expected = (weights[:, None, None] * torch.stack(each)).sum(0)
        torch.testing.assert_close(policy.near_log_probs(batch, tokens, 1.5), expected)
        alone = policy.log_probs(batch, tokens, torch.ones(1))[0]
        torch.testing.assert_close(policy.near_log_probs(batch, tokens, 0.01), alone)


async def test_an_imitator_with_a_label_width_learns_the_neighbours_too() -> None:
    policy = small_policy()
    config = ImitationConfig(optimizer=OptimizerConfig(lr=3e-3, warmup_steps=1), label_width=3.0)
    shown = Demonstration(
        observation=make_batch(), actions=np.full((1, 2), 0.5, np.float32), num_valid=1
    )
    async with DeviceLane(1) as lane:
        imitator = Imitator(policy, lane, config)
        for _ in range(40):
            await imitator.train_step([shown])
    tokens = torch.from_numpy(policy.encode(shown.actions[None]))
    with torch.no_grad():
        near, distant = (
            policy.log_probs(policy.prepare([make_batch()]), tokens + step, torch.ones(1))[0].exp()
            for step in (2, 30)
        )
    assert (near > 0.05).all()
    assert (distant < 0.01).all()


def test_a_label_width_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(ConfigError, match="label_width is 2"):
        make_sft_log_probs(MlpPolicy.__new__(MlpPolicy), 2.0)
    with pytest.raises(ConfigError, match="0 with several ranks"):
        ImitationConfig(label_width=2.0, ranks=2)


@pytest.fixture(scope="module")
def small_oft() -> OpenVlaOft:
    shape = tiny(image_size=28, cameras=("image",), proprio=None, chunk_size=2, action_dim=3)
    return OpenVlaOft.create(shape, seed=0)


def seen_by(number: int, instruction: str = "turn left") -> Observation:
    rng = np.random.default_rng(number)
    image = rng.integers(0, 256, (28, 28, 3), dtype=np.uint8)
    return {"image": image, "instruction": instruction}


def test_copies_of_an_observation_are_one_row_of_the_batch(small_oft: OpenVlaOft) -> None:
    batch = small_oft.prepare(
        [seen_by(0), seen_by(1), seen_by(0), seen_by(1), seen_by(0, "turn right"), seen_by(0)]
    )
    assert batch.images.shape[0] == 3
    assert batch.rows is not None
    assert batch.rows.tolist() == [0, 1, 0, 1, 2, 0]
    assert small_oft.prepare([seen_by(0), seen_by(1), seen_by(0)]).rows is None


def test_log_probs_and_gradients_are_those_of_one_row_each(small_oft: OpenVlaOft) -> None:
    observations = [seen_by(0), seen_by(1), seen_by(0), seen_by(0)]
    tokens = torch.from_numpy(small_oft.encode(np.linspace(-1, 1, 24).reshape(4, 2, 3)))
    ones = torch.ones(4)
    network = small_oft.network

    def gradient() -> torch.Tensor:
        found = torch.cat(
            [each.grad.flatten() for each in network.parameters() if each.grad is not None]
        )
        network.zero_grad()
        return found

    together, entropies = small_oft.log_probs(small_oft.prepare(observations), tokens, ones)
    together.sum().backward()
    shared = gradient()
    for row, observation in enumerate(observations):
        alone, entropy = small_oft.log_probs(
            small_oft.prepare([observation]), tokens[row : row + 1], ones[:1]
        )
        torch.testing.assert_close(together[row], alone[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(entropies[row], entropy[0], atol=1e-4, rtol=1e-4)
        alone.sum().backward()
    torch.testing.assert_close(shared, gradient(), atol=1e-3, rtol=1e-3)


def test_decisions_that_share_an_observation_draw_for_themselves(small_oft: OpenVlaOft) -> None:
    batch = small_oft.prepare([seen_by(0)] * 4)
    samplings = [Sampling(temperature=1.0, seed=number) for number in range(4)]
    sampled = small_oft.sample(batch, samplings)
    tokens, log_probs = sampled.tokens, sampled.log_probs
    assert tokens.shape == log_probs.shape == (4, 6)
    assert len({tuple(row) for row in tokens.tolist()}) == 4
    assert small_oft.features(batch).shape == (4, small_oft.feature_size)
