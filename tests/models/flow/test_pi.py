"""pi0, pi0.5 compute what openpi or LeRobot computes: prompts, images, normalisation, the network."""

from dataclasses import replace
from pathlib import Path

import golden_flow
import numpy as np
import pi_folders
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from benchmarks.flow_references import (
    are_layouts_bit_equal,
    count_refused,
    network_errors,
    step_errors,
)
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.flow.network import FlowInputs
from vla_rl.models.flow.normalization import (
    FIELDS,
    NormalizationKind,
    Normalizer,
    Project,
    count_used,
    require_usable,
)
from vla_rl.models.flow.pi import GEMMA_SIZES, PiKind, PiNetwork, PiSize
from vla_rl.models.flow.pi_folder import load_pi
from vla_rl.models.flow.pi_layers import GemmaSize
from vla_rl.models.flow.pi_processor import resize_padded
from vla_rl.models.flow.pi_prompt import PiTokenizer, format_pi0, format_pi05, read_tokenizer
from vla_rl.models.prismatic.trunk import materialise

KINDS: tuple[PiKind, ...] = ("pi0", "pi05")

BOUND = 1e-5


@pytest.mark.parametrize("project", ["lerobot", "openpi"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_array_of_the_golden_files_is_met(kind: PiKind, project: str) -> None:
    golden = golden_flow.golden_arrays(kind, project)
    network, inputs = (
        golden_flow.golden_network(kind, project),
        golden_flow.golden_inputs(kind, project),
    )
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
    golden = golden_flow.golden_arrays(kind, "openpi")
    network, inputs = (
        golden_flow.golden_network(kind, "openpi"),
        golden_flow.golden_inputs(kind, "openpi"),
    )
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
    golden = golden_flow.golden_arrays(kind, "openpi")
    network, inputs = (
        golden_flow.golden_network(kind, "openpi"),
        golden_flow.golden_inputs(kind, "openpi"),
    )

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
    golden = golden_flow.golden_arrays("pi05", "openpi")
    network, inputs = (
        golden_flow.golden_network("pi05", "openpi"),
        golden_flow.golden_inputs("pi05", "openpi"),
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
    golden = golden_flow.golden_arrays("pi0", "openpi")
    network, inputs = (
        golden_flow.golden_network("pi0", "openpi"),
        golden_flow.golden_inputs("pi0", "openpi"),
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


STATISTICS = {name: np.array(vector) for name, vector in {
    "mean": [0.5, -1.0], "std": [2.0, 0.0], "q01": [-1.0, 3.0], "q99": [3.0, 3.0],
    "q10": [0.0, -1.0], "q90": [1.0, 1.0], "min": [-2.0, 0.0], "max": [2.0, 10.0],
}.items()}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "project", "expected"),
    [
        # worked out by hand for x = [1.5, 4.0]
        ("MEAN_STD", "openpi", [1.0 / 2.000001, 5.0 / 1e-6]),
        ("MEAN_STD", "lerobot", [1.0 / (2.0 + 1e-8), 5.0 / 1e-8]),
        ("QUANTILES", "openpi", [2.5 / 4.000001 * 2 - 1, 1.0 / 1e-6 * 2 - 1]),
        ("QUANTILES", "lerobot", [0.25, 2.0 / 1e-8 - 1]),
        ("QUANTILE10", "lerobot", [2.0, 4.0]),
        ("MIN_MAX", "lerobot", [0.75, -0.2]),
        ("IDENTITY", "lerobot", [1.5, 4.0]),
    ],
)
def test_numbers_are_normalised_as_the_project_does(
    kind: NormalizationKind, project: Project, expected: list[float]
) -> None:
    normalizer = Normalizer(kind, STATISTICS, project)
    found = normalizer.normalise(np.array([[1.5, 4.0]], np.float32))
    np.testing.assert_allclose(found[0], expected, rtol=1e-6)
    assert found.dtype == (np.float64 if project == "openpi" else np.float32)


@pytest.mark.parametrize("project", ["openpi", "lerobot"])
@pytest.mark.parametrize("kind", FIELDS)
def test_what_was_normalised_is_restored(kind: NormalizationKind, project: Project) -> None:
    normalizer = Normalizer(kind, STATISTICS, project)
    values = np.array([[[1.5, -1.0], [-0.5, -1.0]]], np.float32)
    restored = normalizer.restore(normalizer.normalise(values))
    np.testing.assert_allclose(restored[..., 0], values[..., 0], rtol=1e-5)


def test_lerobot_does_not_add_its_epsilon_on_the_way_back() -> None:
    normalizer = Normalizer("MEAN_STD", STATISTICS, "lerobot")
    assert normalizer.restore(np.array([1.0, 7.0], np.float32)).tolist() == [2.5, -1.0]


def test_a_range_in_the_wrong_order_is_refused() -> None:
    exchanged = {"q01": STATISTICS["q90"], "q99": STATISTICS["q10"]}
    with pytest.raises(CheckpointError, match="wrong order at number 0"):
        require_usable("action", "QUANTILES", exchanged, 2, "folder")


def test_some_constant_numbers_are_no_fault() -> None:
    require_usable("action", "QUANTILES", STATISTICS, 2, "folder")


def test_padding_in_statistics_is_not_counted() -> None:
    padded = {name: np.pad(vector, (0, 30)) for name, vector in STATISTICS.items()}
    assert count_used(padded) == 2


def test_prompts_are_those_of_the_projects() -> None:
    assert format_pi0("pick_up\nthe bowl ", "openpi") == "pick up the bowl\n"
    assert format_pi0("pick_up the bowl", "lerobot") == "pick_up the bowl\n"
    assert format_pi0("stack\n", "lerobot") == "stack\n"
    # below the lowest edge, on it, in the middle, above the highest
    state = np.array([-1.5, -1.0, 0.0, 1.7])
    expected = "Task: open the door, State: -1 0 128 255;\nAction: "
    assert format_pi05(" open_the\ndoor", state) == expected


def test_a_prompt_begins_with_bos_is_padded_and_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pi_folders.write_tokenizer(tmp_path)
    tokenizer = PiTokenizer(read_tokenizer(tmp_path, None, 300), 12)
    ids, mask = tokenizer.encode(["ab\n", "abcdefghijklmnop"])
    assert ids.shape == (2, 12)
    assert mask.sum(1).tolist() == [4, 12]
    assert ids[:, 0].tolist() == [2, 2]
    assert ids[0, 4:].tolist() == [0] * 8
    (line,) = [record.getMessage() for record in caplog.records]
    assert "has 17 tokens and is cut to 12" in line


def test_a_tokenizer_that_is_missing_or_of_another_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json and names 'elsewhere'"):
        read_tokenizer(tmp_path, "elsewhere", 300)
    pi_folders.write_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="ids up to 258, expected none beyond the 100 rows"):
        read_tokenizer(tmp_path, None, 100)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        read_tokenizer(tmp_path, None, 300)


def test_images_keep_their_proportions_and_are_padded_with_black() -> None:
    frames = torch.full((1, 3, 64, 32), 255, dtype=torch.uint8)
    for project in ("openpi", "lerobot"):
        found = resize_padded(frames, 56, project)
        assert found.shape == (1, 3, 56, 56)
        torch.testing.assert_close(found[..., 14:42], torch.ones(1, 3, 56, 28))
        assert found[..., :14].eq(-1.0).all()
        assert found[..., 42:].eq(-1.0).all()
    assert resize_padded(frames[..., :32, :], 32, "openpi").eq(1.0).all()
    assert resize_padded(frames, 64, "lerobot")[..., 16:48].eq(1.0).all()


def test_lerobots_images_are_resized_without_antialiasing_openpis_as_pillow_does() -> None:
    frames = torch.randint(
        0, 256, (1, 3, 96, 96), dtype=torch.uint8, generator=torch.manual_seed(0)
    )
    plain = functional.interpolate(frames.float() / 255.0, size=(56, 56), mode="bilinear")
    torch.testing.assert_close(resize_padded(frames, 56, "lerobot"), plain * 2.0 - 1.0)
    frame = Image.fromarray(frames[0].permute(1, 2, 0).numpy())
    pillow = np.asarray(frame.resize((56, 56), Image.Resampling.BILINEAR), np.float32)
    found = resize_padded(frames, 56, "openpi")[0].permute(1, 2, 0).numpy()
    # torch computes in float32, Pillow in fixed point: one step of 255 at most
    assert np.abs((found + 1.0) * 127.5 - pillow).max() <= 1.01


def test_states_are_normalised_padded_and_written_into_the_prompt(tmp_path: Path) -> None:
    observation = {
        "image": np.zeros((8, 8, 3), np.uint8),
        "wrist_image": np.zeros((8, 8, 3), np.uint8),
        "state": np.arange(8, dtype=np.float32) / 10,
        "instruction": "go",
    }
    processor = load_pi(pi_folders.write_lerobot(tmp_path / "pi05", "pi05")).processor
    statistics = {
        name: vector.astype(np.float32) for name, vector in pi_folders.statistics(8, 0).items()
    }
    expected = (
        2 * (observation["state"] - statistics["q01"]) / (statistics["q99"] - statistics["q01"]) - 1
    )
    inputs = processor.prepare([observation], torch.device("cpu"))
    np.testing.assert_allclose(inputs.state[0, :8], expected, rtol=1e-5, atol=1e-6)
    assert inputs.state[0, 8:].eq(0.0).all()
    ids = inputs.tokens[0][inputs.token_mask[0]].tolist()
    tokenizer = read_tokenizer(tmp_path / "pi05", None, 300)
    assert tokenizer.decode(ids) == "<bos>" + format_pi05("go", expected)
    assert processor.identify(observation) == processor.identify(observation | {"other": 1})
    assert processor.identify(observation) != processor.identify(observation | {"instruction": ""})
