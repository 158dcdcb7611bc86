"""Numbers are scaled as the checkpoint's files say: actions, states, pixels.

Bounds come from the set of statistics that was asked for, and none is guessed.
"""

import json
from pathlib import Path
from typing import Any

import golden_recipe
import numpy as np
import public_checkpoint
import pytest
import torch
from libero_bounds import LIBERO_BOUNDS

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft import ActionBounds, ActionTokenizer, unit_bounds
from vla_rl.models.prismatic.config import PUBLIC_PIXELS, TINY_TOKENIZER
from vla_rl.models.prismatic.folder import PREPROCESSOR_FILE, read_pixel_scaling
from vla_rl.models.prismatic.public_config import Extension
from vla_rl.models.prismatic.statistics import (
    STATISTICS_FILE,
    Range,
    Statistics,
    choose_key,
    get_action_bounds,
    get_gripper,
    get_proprio,
    read_statistics,
)


@pytest.mark.parametrize(
    ("action", "token", "decoded"),
    [
        (-1.5, 31999, -254 / 255),
        (-1.0, 31999, -254 / 255),
        (-0.5, 31936, -128 / 255),
        (0.0, 31872, 0.0),
        (0.5, 31808, 128 / 255),
        (0.999, 31745, 254 / 255),
        (1.0, 31744, 254 / 255),
        (1.5, 31744, 254 / 255),
    ],
)
def test_numbers_become_the_tokens_that_the_public_checkpoints_use(
    action: float, token: int, decoded: float
) -> None:
    tokens = ActionTokenizer(32000, 256, unit_bounds(1))
    assert tokens.encode([[action]]).tolist() == [[token]]
    np.testing.assert_allclose(tokens.decode(np.array([[token]])), [[decoded]], atol=1e-7)


def test_a_round_trip_is_off_by_at_most_half_a_bin() -> None:
    tokens = ActionTokenizer(32000, 256, unit_bounds(1))
    actions = np.linspace(-1, 1, 1001)[:, None]
    assert np.abs(tokens.decode(tokens.encode(actions)) - actions).max() <= 1 / 255 + 1e-5


def test_larger_token_ids_are_smaller_actions() -> None:
    tokens = ActionTokenizer(32000, 256, unit_bounds(1))
    decoded = tokens.decode(np.arange(31745, 32000)[:, None])[:, 0]
    assert (np.diff(decoded) < 0).all()


def test_ids_that_are_no_action_decode_to_the_nearest_bin() -> None:
    tokens = ActionTokenizer(32000, 256, unit_bounds(1))
    assert (
        tokens.decode(np.array([[5], [32063]])).tolist()
        == tokens.decode(np.array([[31744], [31999]])).tolist()
    )


def test_scaled_dimensions_span_their_bounds_and_others_are_taken_as_they_are() -> None:
    bounds = ActionBounds(low=(10.0, 0.0), high=(20.0, 1.0), is_scaled=(True, False))
    tokens = ActionTokenizer(1024, 256, bounds)
    # the middle of [10, 20] is 0 for the model, whose token is 1024 - 128; 0.5 unscaled is 1024 -
    # 192
    assert tokens.encode([[15.0, 0.5]]).tolist() == [[896, 832]]
    np.testing.assert_allclose(
        tokens.decode(np.array([[896, 832]])), [[15.0, 128 / 255]], atol=1e-6
    )


def test_the_openvla_gripper_is_zero_to_close_and_libero_wants_plus_one() -> None:
    tokens = ActionTokenizer(32000, 256, LIBERO_BOUNDS["libero_goal"])
    closing, opening = np.zeros((1, 7)), np.zeros((1, 7))
    closing[0, 6], opening[0, 6] = 1.0, -1.0
    assert tokens.encode(closing)[0, 6] == 31872  # the label 0
    assert tokens.encode(opening)[0, 6] == 31744  # the label 1
    assert tokens.decode(tokens.encode(closing))[0, 6] == 1.0
    assert tokens.decode(tokens.encode(opening))[0, 6] == -1.0


def test_unnormalisation_is_done_in_float64() -> None:
    bounds = LIBERO_BOUNDS["libero_spatial"]
    tokens = ActionTokenizer(32000, 256, bounds)
    centre = np.float64(2 * 200 + 1) / 255 - 1  # bin 200 of 0..254
    expected = 0.5 * (centre + 1) * (
        np.array(bounds.high[:6]) - np.array(bounds.low[:6])
    ) + np.array(bounds.low[:6])
    decoded = tokens.decode(np.full((1, 7), 32000 - 201))[0, :6]
    np.testing.assert_array_equal(decoded, expected.astype(np.float32))


def test_actions_of_another_dimension_are_refused() -> None:
    with pytest.raises(ValueError, match="actions have 3 dimensions, expected 7"):
        ActionTokenizer(32000, 256, unit_bounds(7)).encode(np.zeros((8, 3)))


def test_bounds_that_fall_are_refused() -> None:
    with pytest.raises(ConfigError, match="high is"):
        ActionBounds(low=(0.0, 1.0), high=(1.0, 0.9), is_scaled=(True, True))


def write_statistics(folder: Path, content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / STATISTICS_FILE).write_bytes(text)
    return folder


def action(low: float) -> dict[str, Any]:
    return {"action": {"q01": [low], "q99": [9.0]}}


def test_an_earlier_folder_counts_before_a_later_one_and_all_before_the_config(
    tmp_path: Path,
) -> None:
    adapter = write_statistics(tmp_path / "adapter", {"a": action(1.0)})
    base = write_statistics(tmp_path / "base", {"a": action(2.0), "b": action(2.0)})
    in_config = {key: action(3.0) for key in "abc"}
    found = read_statistics([adapter, base, tmp_path / "none"], in_config)
    assert {key: each.action.q01 for key, each in found.items()} == {
        "a": (1.0,),
        "b": (2.0,),
        "c": (3.0,),
    }
    assert in_config["a"] == action(3.0)


@pytest.mark.parametrize("content", [b"{", b"\xff", [1], {"a": {"proprio": {}}}, {"a": 5}])
def test_a_file_of_something_else_is_refused(content: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"action statistics"):
        read_statistics([write_statistics(tmp_path, content)], {})


SETS = {"libero_goal_no_noops": Statistics(action=Range()), "bridge": Statistics(action=Range())}


def test_a_set_is_chosen_by_its_key_with_or_without_idle_steps() -> None:
    assert choose_key(SETS, "bridge", Path("x")) == "bridge"
    assert choose_key(SETS, "libero_goal", Path("x")) == "libero_goal_no_noops"
    both = SETS | {"libero_goal": Statistics(action=Range())}
    assert choose_key(both, "libero_goal", Path("x")) == "libero_goal"


def test_the_only_set_needs_no_key_but_a_wrong_one_is_refused() -> None:
    one = {"bridge": SETS["bridge"]}
    assert choose_key(one, None, Path("x")) == "bridge"
    with pytest.raises(CheckpointError, match=r"with no 'goal'; it has \['bridge'\]"):
        choose_key(one, "goal", Path("x"))


def test_one_of_several_sets_is_never_guessed() -> None:
    with pytest.raises(CheckpointError, match="more than one set, and none was chosen"):
        choose_key(SETS, None, Path("x"))


BOTH_ENDS = Statistics(
    action=Range(q01=(-1.0, 0.0), q99=(1.0, 1.0), min=(-2.0, 0.0), max=(2.0, 1.0))
)


def test_bounds_are_percentiles_or_ends() -> None:
    percentiles = get_action_bounds(BOTH_ENDS, "bounds_q99", gripper="openvla", epsilon=0.0)
    ends = get_action_bounds(BOTH_ENDS, "bounds", gripper="openvla", epsilon=0.0)
    assert (percentiles.low, percentiles.high) == ((-1.0, 0.0), (1.0, 1.0))
    assert (ends.low, ends.high) == ((-2.0, 0.0), (2.0, 1.0))
    assert percentiles.is_scaled == (True, True)


def test_statistics_that_never_change_are_refused() -> None:
    still = Range(q01=(0.0, 0.5, 0.0), q99=(0.0, 0.5, 1.0), mask=(True, True, False))
    with pytest.raises(CheckpointError, match="constant in all 2 scaled numbers"):
        get_action_bounds(Statistics(action=still), "bounds_q99", gripper="openvla", epsilon=0.0)
    part = Range(q01=(0.0, -0.5, 0.0), q99=(0.0, 0.5, 1.0), mask=(True, True, False))
    get_action_bounds(Statistics(action=part), "bounds_q99", gripper="openvla", epsilon=0.0)


@pytest.mark.parametrize(
    "ends", [Range(q01=(1.0,)), Range(q01=(), q99=()), Range(q01=(1.0,), q99=(1.0, 2.0))]
)
def test_bounds_without_their_numbers_are_refused(ends: Range) -> None:
    with pytest.raises(CheckpointError, match="the action statistics have no q01 and q99"):
        get_action_bounds(Statistics(action=ends), "bounds_q99", gripper="openvla", epsilon=0.0)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ((True, True, False), "openvla"),
        ((True, True, True), "signed"),
        ((True, False, False), "signed"),
        (None, "openvla"),
    ],
)
def test_the_gripper_is_read_from_what_is_not_scaled(
    mask: tuple[bool, ...] | None, expected: str
) -> None:
    assert get_gripper(Statistics(action=Range(mask=mask)), Extension()) == expected


def test_the_checkpoints_own_setting_counts_before_its_statistics() -> None:
    scaled = Statistics(action=Range(mask=(True, True)))
    assert get_gripper(scaled, Extension(gripper="openvla")) == "openvla"


def test_proprioception_is_scaled_whole_or_refused() -> None:
    assert get_proprio(BOTH_ENDS, "bounds_q99", "state", "zero") is None
    whole = Range(q01=(0.0,), q99=(2.0,), mask=(True,))
    found = get_proprio(Statistics(action=Range(), proprio=whole), "bounds_q99", "state", "zero")
    assert found is not None
    assert (found.key, found.low, found.high) == ("state", (0.0,), (2.0,))
    part = Range(q01=(0.0,), q99=(2.0,), mask=(False,))
    with pytest.raises(CheckpointError, match="expected one that scales every dimension"):
        get_proprio(Statistics(action=Range(), proprio=part), "bounds_q99", "state", "zero")


IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "inplace": False}
HALF = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "inplace": False}


def write_preprocessor(folder: Path, **changes: Any) -> Path:
    fields = {**golden_recipe.preprocessor(), **changes}
    (folder / PREPROCESSOR_FILE).write_text(
        json.dumps({name: x for name, x in fields.items() if x != "missing"})
    )
    return folder


def test_the_public_file_has_the_constants_that_are_the_default_here(tmp_path: Path) -> None:
    assert read_pixel_scaling([tmp_path], 224) == PUBLIC_PIXELS
    assert read_pixel_scaling([write_preprocessor(tmp_path)], 224) == PUBLIC_PIXELS


@pytest.mark.parametrize(
    "changes",
    [
        {"tvf_normalize_params": [IMAGENET, HALF]},
        # then the file's processor computes them from means and stds
        {"tvf_normalize_params": "missing"},
        # fields of transformers that say what is done anyway
        {
            "tvf_normalize_params": [IMAGENET, HALF],
            "do_rescale": True,
            "do_center_crop": False,
            "size": None,
        },
    ],
)
def test_other_colour_constants_are_what_the_towers_see_by(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    public_checkpoint.write(tmp_path / "public", public_checkpoint.Parts(seed=0), TINY_TOKENIZER)
    square = [28, 28]
    sizes = {
        "input_sizes": [[3, *square]] * 2,
        "tvf_resize_params": [
            {"size": square, "interpolation": 3, "antialias": True, "max_size": None}
        ]
        * 2,
        "tvf_crop_params": [{"output_size": square}] * 2,
    }
    policy = OpenVla.load(
        write_preprocessor(tmp_path / "public", **sizes, **changes), norm_key="libero_goal"
    )
    policy.save(tmp_path / "again")
    images = torch.full((1, 1, 3, 28, 28), 51, dtype=torch.uint8)  # a fifth of 255
    for loaded in (policy, OpenVla.load(tmp_path / "again")):
        seen: dict[str, torch.Tensor] = {}

        def look(
            tower: torch.nn.Module, pixels: torch.Tensor, name: str, seen: Any = seen
        ) -> torch.Tensor:
            seen[name] = pixels
            return torch.zeros(1, 4, 24)

        loaded.network.vision_backbone(images, look)
        expected = (0.2 - torch.tensor(IMAGENET["mean"])) / torch.tensor(IMAGENET["std"])
        torch.testing.assert_close(seen["featurizer"][0, :, 0, 0], expected)
        torch.testing.assert_close(seen["fused_featurizer"][0, :, 0, 0], torch.full((3,), -0.6))


def changed(name: str, tower: int, **fields: Any) -> dict[str, Any]:
    of_both = [dict(held) for held in golden_recipe.preprocessor()[name]]
    of_both[tower] |= fields
    return {name: of_both}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"image_resize_strategy": "letterbox"},
            r"image_resize_strategy is 'letterbox', expected 'resize-naive'",
        ),
        ({"tvf_do_letterbox": True}, "tvf_do_letterbox is True, expected False"),
        ({"use_fused_vision_backbone": False}, "use_fused_vision_backbone is False, expected True"),
        ({"image_mean": [0.5, 0.5, 0.5]}, r"image_mean is \[0\.5, 0\.5, 0\.5\], which is not read"),
        ({"do_normalize": False}, "do_normalize is False, which is not read here"),
        ({"do_center_crop": True}, "do_center_crop is True, which is not read here"),
        ({"a_field_of_tomorrow": 2}, "a_field_of_tomorrow is 2, which is not read here"),
        (
            {"input_sizes": [[3, 384, 384]] * 2},
            r"input_sizes is \[\[3, 384, 384\], .*expected \[\[3, 224, 224\]",
        ),
        (
            {"interpolations": ["bicubic", "bilinear"]},
            r"interpolations is \['bicubic', 'bilinear'\]",
        ),
        (
            changed("tvf_resize_params", 1, interpolation=2),
            r"tvf_resize_params\[1\]\.interpolation is 2, expected 3",
        ),
        (
            changed("tvf_resize_params", 0, antialias=False),
            r"tvf_resize_params\[0\]\.antialias is False",
        ),
        (
            changed("tvf_resize_params", 0, size=224),
            r"tvf_resize_params\[0\]\.size is 224, expected \[224, 224\]",
        ),
        (
            changed("tvf_crop_params", 1, output_size=[200, 200]),
            r"tvf_crop_params\[1\]\.output_size is \[200, 200\]",
        ),
        (
            {"tvf_crop_params": [{"output_size": 224}]},
            "the length of tvf_crop_params is 1, expected 2",
        ),
        (
            changed("tvf_normalize_params", 0, std=[0.0, 1.0, 1.0]),
            r"Expected `float` > 0\.0 - at `\$\.stds",
        ),
        (
            {"tvf_normalize_params": [{"mean": [0.5] * 3}]},
            "cannot be read as the settings of an image processor",
        ),
    ],
)
def test_images_that_would_be_made_otherwise_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_pixel_scaling([write_preprocessor(tmp_path, **changes)], 224)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / PREPROCESSOR_FILE).write_bytes(b"\xff{")
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json cannot be read"):
        read_pixel_scaling([tmp_path], 224)
