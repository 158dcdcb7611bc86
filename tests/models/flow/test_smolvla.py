"""SmolVLA's network computes what LeRobot's does."""

from dataclasses import replace

import msgspec
import pytest
import torch
from tiny_smolvla import SHAPES, TINY, golden_arrays, golden_inputs, golden_weights

from vla_rl.errors import ConfigError
from vla_rl.models.flow.network import FlowInputs, Prefix
from vla_rl.models.flow.smolvla import SmolVlaNetwork


@pytest.fixture(scope="module")
def network() -> SmolVlaNetwork:
    made = SmolVlaNetwork(TINY).eval()
    made.load_state_dict(golden_weights())
    return made


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return golden_arrays()


@pytest.fixture(scope="module")
def inputs() -> FlowInputs:
    return golden_inputs()


@pytest.fixture(scope="module")
def prefix(network: SmolVlaNetwork, inputs: FlowInputs) -> Prefix:
    with torch.no_grad():
        return network.embed_prefix(inputs)


def require_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare as the golden files are meant to be: max |a - b| / max |b|."""
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max() / wanted.abs().max()) <= 1e-5


def integrate(
    network: SmolVlaNetwork, prefix: Prefix, noise: torch.Tensor, num_steps: int
) -> torch.Tensor:
    x = noise
    for step in range(num_steps):
        time = torch.full((len(x),), 1 - step / num_steps)
        x = x - network.velocity(prefix, x, time) / num_steps
    return x


def test_parameters_have_lerobots_names_and_shapes(network: SmolVlaNetwork) -> None:
    named = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
    assert named == SHAPES


def test_prefix_is_lerobots(
    network: SmolVlaNetwork,
    inputs: FlowInputs,
    prefix: Prefix,
    golden: dict[str, torch.Tensor],
) -> None:
    with torch.no_grad():
        embeddings, mask = network.embed_tokens(inputs)
    require_near(embeddings, golden["out_prefix_embeddings"])
    assert torch.equal(mask, golden["out_prefix_pad_mask"])
    assert torch.equal(prefix.mask, golden["out_prefix_pad_mask"])
    assert torch.equal(prefix.positions, golden["out_prefix_pad_mask"].cumsum(1) - 1)
    require_near(prefix.output, golden["out_prefix_output"])
    for layer in (0, 1):
        require_near(prefix.keys[layer], golden[f"out_prefix_key_layer{layer}"])
        require_near(prefix.values[layer], golden[f"out_prefix_value_layer{layer}"])


@torch.no_grad()
def test_velocity_and_loss_are_lerobots(
    network: SmolVlaNetwork, prefix: Prefix, golden: dict[str, torch.Tensor]
) -> None:
    noise, time = golden["in_noise"], golden["in_time"]
    require_near(network.velocity(prefix, noise, time), golden["out_velocity_at_noise_time"])
    mixed = time[:, None, None] * noise + (1 - time[:, None, None]) * golden["in_actions"]
    error = network.velocity(prefix, mixed, time) - (noise - golden["in_actions"])
    require_near(error**2, golden["out_loss"])


@pytest.mark.parametrize("num_steps", [4, 10])
@torch.no_grad()
def test_actions_are_lerobots(
    network: SmolVlaNetwork, prefix: Prefix, golden: dict[str, torch.Tensor], num_steps: int
) -> None:
    actions = integrate(network, prefix, golden["in_noise"], num_steps)
    require_near(actions, golden[f"out_actions_k{num_steps}"])


@torch.no_grad()
def test_an_action_sees_earlier_actions_only(
    network: SmolVlaNetwork, prefix: Prefix, golden: dict[str, torch.Tensor]
) -> None:
    noise, time = golden["in_noise"], golden["in_time"]
    changed = noise.clone()
    changed[:, 3] += 1.0
    before = network.velocity(prefix, noise, time)
    after = network.velocity(prefix, changed, time)
    assert torch.allclose(before[:, :3], after[:, :3], atol=1e-7)
    assert not torch.allclose(before[:, 3:], after[:, 3:], atol=1e-4)


@torch.no_grad()
def test_padding_and_missing_cameras_change_nothing(
    network: SmolVlaNetwork,
    inputs: FlowInputs,
    prefix: Prefix,
    golden: dict[str, torch.Tensor],
) -> None:
    images, tokens = inputs.images.clone(), inputs.tokens.clone()
    images[1, 1] = 0.5
    tokens[1, 4:] = 7
    other = network.embed_prefix(replace(inputs, images=images, tokens=tokens))
    wanted = network.velocity(prefix, golden["in_noise"], golden["in_time"])
    found = network.velocity(other, golden["in_noise"], golden["in_time"])
    assert torch.allclose(found, wanted, atol=1e-6)
    assert torch.allclose(network.features(other), network.features(prefix), atol=1e-5)


@torch.no_grad()
def test_a_repeated_row_of_a_prefix_gives_the_same_velocity(
    network: SmolVlaNetwork, prefix: Prefix, golden: dict[str, torch.Tensor]
) -> None:
    rows = torch.tensor([1, 0, 1])
    noise, time = golden["in_noise"], golden["in_time"]
    wanted = network.velocity(prefix, noise, time)[rows]
    found = network.velocity(prefix.rows(rows), noise[rows], time[rows])
    assert torch.allclose(found, wanted, atol=1e-6)


@torch.no_grad()
def test_image_marks_and_a_padded_prefix_are_masked_as_they_should_be(inputs: FlowInputs) -> None:
    config = msgspec.structs.replace(
        TINY, add_image_special_tokens=True, image_tokens=(201, 202), prefix_length=30
    )
    prefix = SmolVlaNetwork(config).eval().embed_prefix(inputs)
    assert prefix.mask.shape == (2, 30)
    # two cameras of 4 tokens and 3 marks, and a whole prompt of 6, and the state
    assert prefix.mask[0].tolist() == [True] * 21 + [False] * 9
    # of the missing camera only the marks are seen, as in LeRobot
    assert int(prefix.mask[1].sum()) == 4 + 3 + 3 + 4 + 1


def test_fewer_expert_layers_beside_two_kinds_of_attention_are_refused() -> None:
    config = msgspec.structs.replace(TINY, num_expert_layers=2)
    with pytest.raises(ConfigError, match=r"num_expert_layers is 2.*set num_expert_layers to -1"):
        SmolVlaNetwork(config)
    with pytest.raises(ConfigError, match=r"num_expert_layers is 3.*divisor"):
        SmolVlaNetwork(msgspec.structs.replace(TINY, num_expert_layers=3))


@torch.no_grad()
def test_fewer_expert_layers_attend_to_every_second_layer_of_the_text(inputs: FlowInputs) -> None:
    config = msgspec.structs.replace(TINY, num_expert_layers=2, self_attn_every_n_layers=-1)
    made = SmolVlaNetwork(config).eval()
    prefix = made.embed_prefix(inputs)
    x, time = torch.zeros(2, 5, 7), torch.ones(2)
    keys = list(prefix.keys)
    keys[1] = keys[1] + 1.0
    without = made.velocity(replace(prefix, keys=tuple(keys)), x, time)
    assert torch.equal(without, made.velocity(prefix, x, time))
    keys[2] = keys[2] + 1.0
    changed = made.velocity(replace(prefix, keys=tuple(keys)), x, time)
    assert not torch.equal(changed, made.velocity(prefix, x, time))
