"""Scenes to look at: the environments that they make, the recipes behind them, contact sheets of their images."""

import io
import pkgutil
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from rich.console import Console
from toy_runs import evaluated

from vla_rl.cli.help import field_docs
from vla_rl.envs.driving.roads import LAYOUTS
from vla_rl.envs.driving.world import draw_world
from vla_rl.envs.libero.assets import ASSETS_VARIABLE
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.evaluation import result_table
from vla_rl.evaluation.contact_sheets import (
    FRAMES_PER_S,
    WatchedEpisode,
    caption_episodes,
)
from vla_rl.evaluation.drive_sheets import MOST_SCENES, _chosen_scenes, write_drive_sheet
from vla_rl.evaluation.scenes import (
    LiberoScene,
    MetaworldScene,
    Scene,
    describe_other_images,
    resolve_checkpoint,
)
from vla_rl.evaluation.suites import require_for_libero
from vla_rl.models.loading import CheckpointConfig, load_policy
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.models.prismatic.config import TrainingImages, tiny
from vla_rl.models.prismatic.conventions import AS_STORED
from vla_rl.models.shipped import (
    BASE_POLICY,
    FLOW_BASE_POLICY,
    GOAL_BASE_POLICY,
    PLACEHOLDER_BASE_POLICY,
    SHIPPED,
    SHIPPED_FLOW,
    SHIPPED_GOAL,
    is_base_policy,
)
from vla_rl.models.steered import SteeredPolicy, SteeringConfig
from vla_rl.models.steered.folder import load_base
from vla_rl.recipes.eval_libero import EvalLiberoConfig
from vla_rl.recipes.eval_metaworld import EvalMetaworldConfig
from vla_rl.recipes.parity import ParityConfig, Way
from vla_rl.recipes.record_demonstrations import RecordConfig
from vla_rl.recipes.srpo_libero import HeldOutConfig, SrpoLiberoConfig
from vla_rl.recipes.srpo_metaworld import SrpoMetaworldConfig
from vla_rl.recipes.watch_libero import WatchConfig
from vla_rl.types import Config, EnvSpec, Sampling
from vla_rl.types.observation import DRAWN_KEY
from vla_rl.util.imports import import_path

SCENE = LiberoScene(image_size=84, physics="fast", quality="exact")


def test_a_libero_scene_makes_environments_by_the_id_of_a_suite_or_of_all_suites() -> None:
    kwargs = {
        "task_id": 2,
        "image_size": 84,
        "step_limit": None,
        "assets": None,
        "physics": "fast",
        "quality": "exact",
    }
    assert SCENE.make_env_spec("libero_goal", 2) == EnvSpec(
        id="vla_rl/libero_goal-v0", kwargs=kwargs
    )
    published = msgspec.structs.replace(SCENE, scenes="published")
    assert published.make_env_spec("libero_goal_swap", 2, scene_seed=0) == EnvSpec(
        id="vla_rl/libero-v0",
        kwargs={"suite": "libero_goal_swap", **kwargs, "scene_seed": 0, "scenes": "published"},
    )


def test_a_metaworld_scene_makes_environments_by_the_id_of_the_suite() -> None:
    scene = MetaworldScene(image_size=84, step_limit=200, quality="fast")
    assert scene.make_env_spec("metaworld_mt10", 3) == EnvSpec(
        id="vla_rl/metaworld_mt10-v0",
        kwargs={"task_id": 3, "image_size": 84, "step_limit": 200, "quality": "fast"},
    )


@pytest.mark.parametrize(
    ("config", "image_size", "step_limit", "quality", "physics", "scenes"),
    [
        (EvalLiberoConfig(), 84, None, "fast", "exact", "published"),
        (EvalLiberoConfig(checkpoint="any"), 256, None, "exact", "exact", "published"),
        (WatchConfig(), 224, None, "exact", "exact", "same"),
        (RecordConfig(), 224, None, "exact", "fast", "same"),
        (SrpoLiberoConfig(), 84, 160, "fast", "fast", "same"),
        (SrpoLiberoConfig(policy="any"), 256, None, "exact", "fast", "same"),
    ],
)
def test_defaults_of_the_recipes_are_those_of_the_table(
    config: EvalLiberoConfig | WatchConfig | RecordConfig | SrpoLiberoConfig,
    image_size: int,
    step_limit: int | None,
    quality: str,
    physics: str,
    scenes: str,
) -> None:
    found = config.scene
    assert isinstance(found, LiberoScene)
    assert (found.image_size, found.step_limit, found.quality) == (image_size, step_limit, quality)
    assert (found.physics, found.scenes) == (physics, scenes)


def test_held_out_episodes_have_the_images_of_training_and_the_physics_of_evaluations() -> None:
    training = SrpoLiberoConfig(image_size=64, quality="exact", step_limit=100)
    assert training.held_out_scene == msgspec.structs.replace(
        training.scene, physics="exact", step_limit=None
    )


OF_LIBERO = [
    EvalLiberoConfig,
    WatchConfig,
    RecordConfig,
    SrpoLiberoConfig,
    HeldOutConfig,
    ParityConfig,
    Way,
]
OF_METAWORLD = [EvalMetaworldConfig, SrpoMetaworldConfig]


@pytest.mark.parametrize("recipe", OF_LIBERO)
def test_options_of_a_libero_scene_are_declared_once(recipe: type[Config]) -> None:
    declared_once(recipe, LiberoScene)


@pytest.mark.parametrize("recipe", OF_METAWORLD)
def test_options_of_a_metaworld_scene_are_declared_once(recipe: type[Config]) -> None:
    declared_once(recipe, MetaworldScene)


def declared_once(recipe: type[Config], scene: type[Scene]) -> None:
    """Assert that a recipe's options have the types of the scene, which carry their help."""
    types, own_types = (get_type_hints(kind, include_extras=True) for kind in (scene, recipe))
    shared = set(scene.__struct_fields__) & set(recipe.__struct_fields__)
    assert shared
    words = field_docs(recipe)
    for name in shared:
        declared = types[name]
        assert own_types[name] in (declared, declared | None, get_args(declared)[0]), name
        described = declared if hasattr(declared, "__metadata__") else get_args(declared)[0]
        assert words[name].startswith(described.__metadata__[0].description), name


@pytest.fixture
def own_assets(tmp_path: Path) -> str:
    """A folder that looks like LIBERO's own assets."""
    for name in ("scenes", "textures"):
        (tmp_path / name).mkdir()
    return str(tmp_path)


def test_the_shipped_policy_that_acts_is_the_one_of_the_assets_in_use(
    own_assets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_checkpoint(SHIPPED, "stand-ins") == str(PLACEHOLDER_BASE_POLICY)
    assert resolve_checkpoint(SHIPPED, own_assets) == str(BASE_POLICY)
    monkeypatch.setenv(ASSETS_VARIABLE, own_assets)
    assert resolve_checkpoint(SHIPPED, None) == str(BASE_POLICY)
    assert resolve_checkpoint(SHIPPED, "stand-ins") == str(PLACEHOLDER_BASE_POLICY)


def test_a_policy_that_was_asked_for_acts_on_any_assets(own_assets: str) -> None:
    for asked in ("mine", str(PLACEHOLDER_BASE_POLICY), "openvla/openvla-7b"):
        assert resolve_checkpoint(asked, own_assets) == asked


@pytest.mark.parametrize(
    ("name", "folder"), [(SHIPPED_FLOW, FLOW_BASE_POLICY), (SHIPPED_GOAL, GOAL_BASE_POLICY)]
)
def test_another_shipped_policy_has_a_name_and_the_images_of_its_training(
    name: str, folder: Path, own_assets: str
) -> None:
    assert resolve_checkpoint(name, own_assets) == str(folder)
    assert is_base_policy(name)
    assert is_base_policy(str(folder))
    assert describe_other_images(str(folder), "wheels", 84, "fast") is None
    line = describe_other_images(str(folder), "stand-ins", 84, "fast")
    assert line is not None
    assert "on LIBERO's own assets, not on stand-ins" in line


def test_assets_that_are_not_there_are_an_error_before_any_policy_is_chosen(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="LIBERO's assets were not found in"):
        resolve_checkpoint(SHIPPED, str(tmp_path / "none"))


def test_the_shipped_policies_are_there() -> None:
    bases = (BASE_POLICY, PLACEHOLDER_BASE_POLICY, FLOW_BASE_POLICY, GOAL_BASE_POLICY)
    assert all((base / "model.safetensors").is_file() for base in bases)


def test_the_shipped_flow_policy_is_small_and_decides_for_liberos_arm() -> None:
    size = sum(path.stat().st_size for path in FLOW_BASE_POLICY.iterdir())
    assert size <= 15_000_000
    policy = load_policy(str(FLOW_BASE_POLICY), CheckpointConfig(), "cpu")
    require_for_libero(policy, SHIPPED_FLOW)
    seen = policy.example_observation(0)  # type: ignore[attr-defined]
    del seen[DRAWN_KEY]
    with torch.inference_mode():
        sampled = policy.sample(policy.prepare([seen]), [Sampling(greedy=True)])
    tokens = sampled.tokens if sampled.chunk is None else sampled.chunk
    actions = policy.decode(tokens.numpy())
    assert actions.shape == (1, 8, 7)
    assert np.isfinite(actions).all()


@pytest.mark.parametrize(
    ("policy", "source", "size", "quality", "expected"),
    [
        (PLACEHOLDER_BASE_POLICY, "wheels", 84, "fast", "on placeholder assets, not on wheels"),
        (BASE_POLICY, "stand-ins", 84, "fast", "on LIBERO's own assets, not on stand-ins"),
        (BASE_POLICY, "package", 84, "exact", "in the quality fast, not exact"),
        (BASE_POLICY, "package", 224, "fast", "at 84 pixels, not 224"),
    ],
)
def test_one_line_says_that_a_shipped_policy_sees_other_images_than_it_was_trained_on(
    policy: Path, source: str, size: int, quality: str, expected: str
) -> None:
    line = describe_other_images(str(policy), source, size, quality)  # type: ignore[arg-type]
    assert line is not None
    assert expected in line
    assert "\n" not in line


def test_one_line_says_it_of_a_policy_that_was_trained_here_too(tmp_path: Path) -> None:
    shape = tiny(image_size=28, cameras=("image",), proprio=None, chunk_size=1, action_dim=7)
    images = TrainingImages(image_size=84, quality="fast", assets="own")
    OpenVlaOft.create(replace(shape, training_images=images), seed=0).save(tmp_path / "mine")
    mine = str(tmp_path / "mine")
    line = describe_other_images(mine, "stand-ins", 256, "exact")
    assert line == (
        f"{mine} was trained on LIBERO's own assets, not on stand-ins; in the quality fast, not exact; "
        "at 84 pixels, not 256: it does worse on these images"
    )
    assert describe_other_images(mine, "wheels", 84, "fast") is None
    OpenVlaOft.load(mine).save(tmp_path / "again")
    assert describe_other_images(str(tmp_path / "again"), "wheels", 84, "exact") is not None


def test_images_of_a_training_that_cannot_be_read_are_one_error(tmp_path: Path) -> None:
    SrpoLiberoConfig(policy="shipped_flow").load_starting_policy().save(tmp_path / "mine")
    (tmp_path / "mine/vla_rl_images.json").write_text('{"image_size": 84')
    with pytest.raises(CheckpointError, match=r"vla_rl_images\.json.*sizes and quality of images"):
        describe_other_images(str(tmp_path / "mine"), "wheels", 84, "fast")


@pytest.mark.parametrize("start", ["shipped", "shipped_flow"])
def test_a_policy_that_was_trained_here_is_shown_the_images_of_its_training(
    tmp_path: Path, start: str
) -> None:
    trained = SrpoLiberoConfig(policy=start, assets="stand-ins").load_starting_policy()
    seen = TrainingImages(image_size=84, quality="fast", assets="stand-ins")
    assert trained.config.training_images == seen  # type: ignore[attr-defined]
    mine, head = str(tmp_path / "mine"), str(tmp_path / "head")
    trained.copy().save(tmp_path / "first")
    # whatever is done with it later
    load_policy(str(tmp_path / "first"), AS_STORED, torch.device("cpu")).save(tmp_path / "mine")
    base = load_base(mine, AS_STORED, torch.device("cpu"), False)
    SteeredPolicy.create(base, SteeringConfig(scale=(0.5,)), seed=0).save(tmp_path / "head")
    for checkpoint in (mine, head):
        for config in (
            EvalLiberoConfig(checkpoint=checkpoint),
            SrpoLiberoConfig(policy=checkpoint),
        ):
            assert (config.scene.image_size, config.scene.quality) == (84, "fast")
    chosen = EvalLiberoConfig(checkpoint=mine, image_size=128, quality="exact").scene
    assert (chosen.image_size, chosen.quality) == (128, "exact")
    for other in ("openvla/openvla-7b", "9" * 4000, "a\0b", "~nobody-of-this-name/policy"):
        unknown = EvalLiberoConfig(checkpoint=other).scene
        assert (unknown.image_size, unknown.quality) == (256, "exact")


def test_images_as_a_policy_saw_them_in_training_need_no_line() -> None:
    assert describe_other_images(str(PLACEHOLDER_BASE_POLICY), "stand-ins", 84, "fast") is None
    assert describe_other_images(str(BASE_POLICY), "wheels", 84, "fast") is None
    assert describe_other_images("openvla/openvla-7b", "wheels", 256, "exact") is None


def test_the_process_that_evaluates_checkpoints_finds_the_function_by_its_path() -> None:
    assert pkgutil.resolve_name(import_path(write_drive_sheet)) is write_drive_sheet


def test_the_first_scene_of_each_layout_is_chosen() -> None:
    chosen = _chosen_scenes("held_out", None)
    kinds = [draw_world(number, "held_out").kind for number in range(MOST_SCENES)]
    assert chosen == {kinds.index(kind): kind for kind in set(kinds)}


def test_a_named_layout_has_its_contact_sheets_in_the_first_round_of_layouts() -> None:
    assert _chosen_scenes("held_out", "tee") == dict.fromkeys(range(len(LAYOUTS)), "tee")


def watched(start: int, is_success: bool, num_steps: int) -> WatchedEpisode:
    frames = [np.full((64, 64, 3), index, np.uint8) for index in range(3)]
    steps = {"steps": float(num_steps), "attempts": 1.0}
    record = evaluated("libero_goal/3", start, is_success, parts=steps, instruction="open it")
    return WatchedEpisode(record, frames, None if is_success else "the drawer is closed")


def test_a_failure_is_told_with_the_experts_reason() -> None:
    assert watched(4, True, 90).describe() == (
        "libero_goal/3 from 4: success after 90 control steps"
    )
    assert watched(5, False, 280).describe() == (
        "libero_goal/3 from 5: failure after 280 control steps: the drawer is closed"
    )


def test_the_table_has_the_mean_length_of_the_successes() -> None:
    console = Console(file=io.StringIO(), width=100, record=True)
    episodes = [watched(0, True, 80), watched(1, True, 100), watched(2, False, 280)]
    console.print(result_table([episode.record for episode in episodes], "by an expert"))
    row = next(line for line in console.export_text().splitlines() if "libero_goal/3" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "libero_goal/3",
        "open it",
        "2/3 = 66.7 % (20.8 to 93.9)",
        "90",
    ]


def test_the_last_frame_stays_for_a_second() -> None:
    frames = list(caption_episodes([watched(0, True, 2)]))
    assert len(frames) == 2 + FRAMES_PER_S
    assert frames[0].shape[0] > frames[0].shape[1]  # the caption is below the square frame
    assert not np.array_equal(frames[0], frames[2])
    assert all(np.array_equal(frame, frames[2]) for frame in frames[2:])
