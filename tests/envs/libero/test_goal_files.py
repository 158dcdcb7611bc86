"""Goal files of one's own: their words, and what an error names."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from vla_rl.envs.libero.assets import find_assets
from vla_rl.envs.libero.loading import load_libero
from vla_rl.envs.libero.packages import LIBERO, find_package_root, list_installed_packages
from vla_rl.envs.libero.scene import Scene
from vla_rl.envs.libero.task_files import check_goal_file, read_instruction
from vla_rl.envs.libero.tasks import find_task

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
