"""Scenes: the environments that they make, and the options of the recipes behind them."""

from typing import get_type_hints

import msgspec
import pytest

import vla_rl.evaluation
from vla_rl.cli.help import field_docs
from vla_rl.evaluation.scenes import LiberoScene, MetaworldScene, Scene
from vla_rl.recipes.eval_libero import EvalLiberoConfig
from vla_rl.recipes.eval_metaworld import EvalMetaworldConfig
from vla_rl.recipes.parity import ParityConfig, Way
from vla_rl.recipes.record_demonstrations import RecordConfig
from vla_rl.recipes.srpo_libero import HeldOutConfig, LiberoConfig
from vla_rl.recipes.srpo_metaworld import MetaworldConfig
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


def test_the_old_function_of_an_environment_is_kept_for_one_release() -> None:
    with pytest.deprecated_call(match=r"libero_env is LiberoScene\(...\).env now"):
        old = vla_rl.evaluation.libero_env(
            "libero_goal", 2, assets=None, image_size=84, step_limit=None, physics="fast",
            quality="exact",
        )  # fmt: skip
    assert old == SCENE.env("libero_goal", 2, scene_seed=0)


@pytest.mark.parametrize(
    ("config", "image_size", "step_limit", "quality", "physics", "scenes"),
    [
        (EvalLiberoConfig(), 84, None, "fast", "exact", "published"),
        (EvalLiberoConfig(checkpoint="any"), 256, None, "exact", "exact", "published"),
        (WatchConfig(), 224, None, "exact", "exact", "same"),
        (RecordConfig(), 224, None, "exact", "fast", "same"),
        (LiberoConfig(), 84, 160, "fast", "fast", "same"),
        (LiberoConfig(policy="any"), 256, None, "exact", "fast", "same"),
    ],
)
def test_defaults_of_the_recipes_are_those_of_the_table(
    config: EvalLiberoConfig | WatchConfig | RecordConfig | LiberoConfig,
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
    training = LiberoConfig(image_size=64, quality="exact", step_limit=100)
    assert training.held_out_scene == msgspec.structs.replace(
        training.scene, physics="exact", step_limit=None
    )


OF_LIBERO = [
    EvalLiberoConfig,
    WatchConfig,
    RecordConfig,
    LiberoConfig,
    HeldOutConfig,
    ParityConfig,
    Way,
]
OF_METAWORLD = [EvalMetaworldConfig, MetaworldConfig]


@pytest.mark.parametrize("recipe", OF_LIBERO)
def test_options_of_a_libero_scene_have_one_wording_and_one_type(recipe: type[Config]) -> None:
    one_wording_and_type(recipe, LiberoScene)


def test_options_of_a_metaworld_scene_have_one_wording_in_both_recipes() -> None:
    evaluating, training = map(field_docs, OF_METAWORLD)
    for name in MetaworldScene.__struct_fields__:
        assert evaluating[name] == training[name]


def one_wording_and_type(recipe: type[Config], scene: type[Scene]) -> None:
    """Assert that help differs at most in what None means and in a sentence of the recipe's own."""
    words, own = field_docs(scene), field_docs(recipe)
    types, own_types = get_type_hints(scene), get_type_hints(recipe)
    shared = set(scene.__struct_fields__) & set(recipe.__struct_fields__)
    assert shared
    for name in shared:
        if name in own:
            assert own[name].startswith(words[name].partition(" None:")[0].rstrip(".")), name
        assert own_types[name] in (types[name], types[name] | None), name
