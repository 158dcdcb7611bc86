"""What the names of LIBERO-plus's and LIBERO-PRO's tasks say: which files they have, and what was
changed.
"""

import pytest

from vla_rl.envs.libero.packages import get_suite_change, join_suite, parse_variant, split_suite

STOVE = "turn_on_the_stove"


@pytest.mark.parametrize(
    ("name", "kind", "goal", "states", "noise"),
    [
        (STOVE, "", STOVE, f"libero_goal/{STOVE}", 0),
        (f"{STOVE}_view_15_0_100_0_0_initstate_0", "camera", STOVE, f"libero_goal/{STOVE}", 0),
        (f"{STOVE}_view_0_0_100_0_0_initstate_7", "robot", STOVE, f"libero_goal/{STOVE}", 0),
        (
            f"{STOVE}_view_0_0_100_0_0_initstate_0_noise_31",
            "noise",
            STOVE,
            f"libero_goal/{STOVE}",
            31,
        ),
        (
            f"{STOVE}_view_0_20_100_0_0_initstate_2_noise_3",
            "noise+camera+robot",
            STOVE,
            f"libero_goal/{STOVE}",
            3,
        ),
        (
            f"{STOVE}_language_4_view_0_0_100_0_0_initstate_0",
            "language",
            f"{STOVE}_language_4",
            f"libero_goal/{STOVE}",
            0,
        ),
        (f"{STOVE}_table_1", "background", f"{STOVE}_table_1", f"libero_goal/{STOVE}", 0),
        (f"{STOVE}_tb_12", "background", f"{STOVE}_tb_12", f"libero_goal/{STOVE}", 0),
        (f"{STOVE}_light_2", "light", f"{STOVE}_light_2", f"libero_goal/{STOVE}", 0),
        (
            f"{STOVE}_add_10",
            "layout",
            f"{STOVE}_add_10",
            f"libero_newobj/libero_goal/{STOVE}_add_10",
            0,
        ),
        (
            f"{STOVE}_level1_sample3",
            "layout",
            f"{STOVE}_level1_sample3",
            f"libero_newobj/libero_goal/{STOVE}_level1_sample3",
            0,
        ),
    ],
)
def test_a_name_says_what_was_changed_and_where_its_files_are(
    name: str, kind: str, goal: str, states: str, noise: int
) -> None:
    variant = parse_variant("libero_goal", name)
    found = (
        variant.origin,
        variant.kind,
        variant.goal_stem,
        str(variant.states_stem),
        variant.noise,
    )
    assert found == (STOVE, kind, goal, states, noise)


@pytest.mark.parametrize(
    ("suite", "origin", "kind"),
    [
        ("libero_goal", "libero_goal", ""),
        ("libero_goal_lan", "libero_goal", "language"),
        ("libero_object_temp_x0.1", "libero_object", "temp_x0.1"),
        ("libero_study_table", None, ""),
    ],
)
def test_a_suite_that_was_made_from_another_says_what_was_changed(
    suite: str, origin: str | None, kind: str
) -> None:
    assert get_suite_change(suite, origin) == kind


@pytest.mark.parametrize(
    ("suite", "package", "name"),
    [
        ("libero_goal", "libero", "libero_goal"),
        ("liberopro.libero_goal_swap", "liberopro", "libero_goal_swap"),
        ("liberoplus.libero_object", "liberoplus", "libero_object"),
        # a dot of LIBERO-PRO's own
        ("libero_object_temp_x0.1", "libero", "libero_object_temp_x0.1"),
    ],
)
def test_a_suite_is_of_the_package_before_its_dot(suite: str, package: str, name: str) -> None:
    assert split_suite(suite) == (package, name)
    assert join_suite(package, name) == suite
