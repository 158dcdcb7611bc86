"""Scenes: the environments that they make, the options of the recipes behind them, and unknown images."""

from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest
from msgspec.structs import replace

from vla_rl.cli.help import field_docs
from vla_rl.envs.libero.assets import ASSETS_VARIABLE
from vla_rl.errors import ConfigError
from vla_rl.evaluation.scenes import (
    LiberoScene,
    MetaworldScene,
    Scene,
    describe_other_images,
    resolve_checkpoint,
)
from vla_rl.models.loading import BASE_POLICY, PLACEHOLDER_BASE_POLICY, SHIPPED
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.models.prismatic.config import TrainingImages, tiny
from vla_rl.recipes.eval_libero import EvalLiberoConfig
from vla_rl.recipes.eval_metaworld import EvalMetaworldConfig
from vla_rl.recipes.parity import ParityConfig, Way
from vla_rl.recipes.record_demonstrations import RecordConfig
from vla_rl.recipes.srpo_libero import HeldOutConfig, SrpoLiberoConfig
from vla_rl.recipes.srpo_metaworld import SrpoMetaworldConfig
from vla_rl.recipes.watch_libero import WatchConfig
from vla_rl.types import Config, EnvSpec

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
    assert SCENE.env("libero_goal", 2) == EnvSpec(id="vla_rl/libero_goal-v0", kwargs=kwargs)
    published = msgspec.structs.replace(SCENE, scenes="published")
    assert published.env("libero_goal_swap", 2, scene_seed=0) == EnvSpec(
        id="vla_rl/libero-v0",
        kwargs={"suite": "libero_goal_swap", **kwargs, "scene_seed": 0, "scenes": "published"},
    )


def test_a_metaworld_scene_makes_environments_by_the_id_of_the_suite() -> None:
    scene = MetaworldScene(image_size=84, step_limit=200, quality="fast")
    assert scene.env("metaworld_mt10", 3) == EnvSpec(
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


def test_assets_that_are_not_there_are_an_error_before_any_policy_is_chosen(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="LIBERO's assets were not found in"):
        resolve_checkpoint(SHIPPED, str(tmp_path / "none"))


def test_both_shipped_policies_are_there() -> None:
    assert all(
        (base / "model.safetensors").is_file() for base in (BASE_POLICY, PLACEHOLDER_BASE_POLICY)
    )


@pytest.mark.parametrize(
    ("policy", "source", "size", "quality", "expected"),
    [
        (PLACEHOLDER_BASE_POLICY, "wheels", 84, "fast", "on placeholder assets, not on wheels"),
        (BASE_POLICY, "stand-ins", 84, "fast", "on LIBERO's own assets, not on stand-ins"),
        (BASE_POLICY, "package", 84, "exact", "in the quality fast, not exact"),
        (BASE_POLICY, "package", 224, "fast", "at 84 pixels, not 224"),
    ],
)
def test_one_line_says_that_a_shipped_policy_sees_other_images_than_it_was_taught(
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


def test_images_as_a_policy_was_taught_them_need_no_line() -> None:
    assert describe_other_images(str(PLACEHOLDER_BASE_POLICY), "stand-ins", 84, "fast") is None
    assert describe_other_images(str(BASE_POLICY), "wheels", 84, "fast") is None
    assert describe_other_images("openvla/openvla-7b", "wheels", 256, "exact") is None
