"""Networks of pi0 and pi0.5 compute what openpi and LeRobot compute."""

from dataclasses import replace

import pytest
import tiny_pi
import torch
from torch import Tensor

from benchmarks.flow_references import (
    are_layouts_bit_equal,
    count_refused,
    network_errors,
    step_errors,
)
from vla_rl.errors import ConfigError
from vla_rl.models.flow.network import FlowInputs
from vla_rl.models.flow.pi import GEMMA_SIZES, PiKind, PiNetwork, PiSize
from vla_rl.models.flow.pi_layers import GemmaSize
from vla_rl.models.prismatic.trunk import materialise

KINDS: tuple[PiKind, ...] = ("pi0", "pi05")
BOUND = 1e-5


@pytest.mark.parametrize("project", ["lerobot", "openpi"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_array_of_the_golden_files_is_met(kind: PiKind, project: str) -> None:
    golden = tiny_pi.golden_arrays(kind, project)
    network, inputs = tiny_pi.golden_network(kind, project), tiny_pi.golden_inputs(kind, project)
    errors = network_errors(network, golden, inputs) | step_errors(network, golden, inputs)
    # an adaptive norm alone, whose weights are not in the files
    outputs = {each for each in golden if each.startswith("out_") and "adarms" not in each}
    assert {f"out_{name}" for name in errors} == outputs
    assert max(errors.values()) <= BOUND, errors


def test_the_benchmark_finds_every_layout_whole_and_every_broken_folder_refused() -> None:
    assert are_layouts_bit_equal()
    assert count_refused() == 10


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_depends_on_neither_other_rows_nor_padding_nor_a_missing_camera(kind: PiKind) -> None:
    golden = tiny_pi.golden_arrays(kind, "openpi")
    network, inputs = tiny_pi.golden_network(kind, "openpi"), tiny_pi.golden_inputs(kind, "openpi")
    both = network.velocity(network.embed_prefix(inputs), golden["in_noise"], golden["in_time"])
    # the second row alone, without the padding of its prompt and without its missing camera
    alone = FlowInputs(
        inputs.images[1:, :1],
        inputs.image_mask[1:, :1],
        inputs.tokens[1:, :4],
        inputs.token_mask[1:, :4],
        inputs.state[1:],
    )
    prefix = network.embed_prefix(alone)
    found = network.velocity(prefix, golden["in_noise"][1:], golden["in_time"][1:])
    assert torch.allclose(found, both[1:], rtol=0, atol=2e-6)
    assert torch.allclose(
        network.features(prefix),
        network.features(network.embed_prefix(inputs))[1:],
        rtol=0,
        atol=2e-6,
    )


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_images_prompt_and_time_move_the_velocity(kind: PiKind) -> None:
    golden = tiny_pi.golden_arrays(kind, "openpi")
    network, inputs = tiny_pi.golden_network(kind, "openpi"), tiny_pi.golden_inputs(kind, "openpi")

    def velocity(changed: FlowInputs, time: Tensor = golden["in_time"]) -> Tensor:
        return network.velocity(network.embed_prefix(changed), golden["in_noise"], time)

    before = velocity(inputs)
    assert not torch.equal(before, velocity(replace(inputs, images=-inputs.images)))
    assert not torch.equal(before, velocity(replace(inputs, tokens=inputs.tokens + 1)))
    assert not torch.equal(before, velocity(inputs, golden["in_time"] / 2))
    # the state is a token of pi0 alone; pi0.5 reads it in the prompt
    moved = torch.equal(before, velocity(replace(inputs, state=-inputs.state)))
    assert moved == (kind == "pi05")


def test_one_observation_serves_several_chunks_with_gradients_to_every_weight() -> None:
    golden = tiny_pi.golden_arrays("pi05", "openpi")
    network, inputs = (
        tiny_pi.golden_network("pi05", "openpi"),
        tiny_pi.golden_inputs("pi05", "openpi"),
    )
    index = torch.tensor([0, 1, 1])
    prefix = network.embed_prefix(inputs).rows(index)
    velocity = network.velocity(prefix, golden["in_noise"][index], torch.tensor([0.3, 0.5, 0.9]))
    velocity.square().sum().backward()
    without = {name for name, each in network.named_parameters() if each.grad is None}
    # what only the trunk's own output reads: the last layer behind its keys and values, its norm
    trunk = "paligemma_with_expert.paligemma.model.language_model"
    last = f"{trunk}.layers.1."
    assert without
    assert all(name.startswith((last, f"{trunk}.norm")) for name in without)
    assert not any("k_proj" in name or "v_proj" in name for name in without)


def test_public_sizes_have_the_public_number_of_parameters() -> None:
    with torch.device("meta"):
        network = PiNetwork(PiSize(kind="pi05"))
    # 3.35 billion: PaliGemma-3B without its head and an expert of 430 million
    assert sum(each.numel() for each in network.parameters()) == 3_353_433_872
    assert set(GEMMA_SIZES) == {"gemma_2b", "gemma_300m"}


def test_a_network_made_without_memory_computes_the_same_once_loaded() -> None:
    golden = tiny_pi.golden_arrays("pi0", "openpi")
    network, inputs = (
        tiny_pi.golden_network("pi0", "openpi"),
        tiny_pi.golden_inputs("pi0", "openpi"),
    )
    with torch.device("meta"):
        empty = PiNetwork(network.size).eval()
    empty.load_state_dict(network.state_dict(), assign=True)
    materialise(empty, torch.device("cpu"))
    given = golden["in_noise"], golden["in_time"]
    with torch.no_grad():
        found = empty.velocity(empty.embed_prefix(inputs), *given)
        assert torch.equal(found, network.velocity(network.embed_prefix(inputs), *given))


def test_an_expert_that_does_not_fit_its_trunk_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expert .* the same depth"):
        PiSize(kind="pi0", expert=GemmaSize(width=1024, depth=17, mlp_width=4096))
