"""Strips of held-out drives: which scenes have one, and who can write it."""

from vla_rl.envs.driving.layouts import LAYOUTS
from vla_rl.envs.driving.world import draw_world
from vla_rl.evaluation.driving_strips import MOST_LOOKED_AT, _chosen_scenes, write_drive_strip
from vla_rl.evaluation.evaluator import imported
from vla_rl.util.imports import import_path


def test_the_process_that_evaluates_beside_training_finds_the_function_by_its_path() -> None:
    assert imported(import_path(write_drive_strip)) is write_drive_strip


def test_the_first_scene_of_each_layout_is_chosen() -> None:
    chosen = _chosen_scenes("held_out", None)
    kinds = [draw_world(number, "held_out").kind for number in range(MOST_LOOKED_AT)]
    assert chosen == {kinds.index(kind): kind for kind in set(kinds)}


def test_a_named_layout_has_its_strips_in_the_first_round_of_layouts() -> None:
    assert _chosen_scenes("held_out", "tee") == dict.fromkeys(range(len(LAYOUTS)), "tee")
