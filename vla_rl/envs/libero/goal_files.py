"""Read LIBERO's goal files (.bddl), the descriptions of a task's scene and goal.

LIBERO's own parsers build the scene of them; their errors name neither the file nor the place. So a
file is read here first, by the same rules: comments begin with `;`, everything is in brackets, and
upper and lower case are the same but in the instruction.

    (define (problem NAME) (:domain robosuite) (:language put the bowl on the plate) (:regions ...)
      (:fixtures ...) (:objects ...) (:init ...) (:goal (And (On akita_black_bowl_1 plate_1))))
"""

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, TypeAlias

from vla_rl.util.agreement import excerpt

_COMMENT: Final = re.compile(r";.*")
_TOKEN: Final = re.compile(r"[()]|[^\s()]+")
_LANGUAGE: Final = re.compile(r"\(\s*:language\b([^()]*)([()]?)", re.IGNORECASE)
_OF_EACH_FILE: Final = ("problem", ":domain", ":goal")


class Group(list["str | Group"]):
    """Words and further groups, between two brackets of a goal file."""

    line: int
    """Number of the line with the opening bracket."""

    @property
    def name(self) -> str:
        """The first word, in lower case; empty if there is none."""
        return self[0].lower() if self and isinstance(self[0], str) else ""


Node: TypeAlias = str | Group


def instruction_of(path: Path) -> str:
    """Return the words of a goal file, whatever the rest of it is.

    Raises: FileNotFoundError; ValueError naming the file.
    """
    found = _LANGUAGE.findall("\n".join(_lines_of(path)))
    if len(found) != 1 or not found[0][0].strip():
        raise ValueError(
            f"{path} has {len(found)} instructions, expected one `(:language ...)` with words."
        )
    ((words, end),) = found
    if end != ")":
        raise ValueError(
            f"{path}: the instruction {excerpt(words.strip())} holds brackets, expected words alone."
        )
    return " ".join(words.split())


def check_goal_file(path: Path, predicates: Collection[str]) -> None:
    """Check that LIBERO can read a goal file, and its goal above all.

    Args:
        predicates: names of the predicates that LIBERO can evaluate, in lower case.

    Raises: FileNotFoundError; ValueError naming the file, the line and the predicate.
    """
    instruction_of(path)
    sections = {group.name: group for group in _sections(path)}
    if missing := [name for name in _OF_EACH_FILE if name not in sections]:
        raise ValueError(f"{path} has no `({missing[0]} ...)`, expected one in each goal file.")
    known = _names_in(path)
    for state in _goal_of(path, sections[":goal"]):
        name, arguments = state.name, [each for each in state[1:] if isinstance(each, str)]
        if name not in predicates:
            raise _error(
                path,
                state,
                f"the goal has the predicate {excerpt(name)}, expected one of "
                f"{', '.join(sorted(predicates))}",
            )
        if len(arguments) != len(state) - 1 or not 1 <= len(arguments) <= 2:
            raise _error(
                path, state, f"the predicate {name} is {_text_of(state)}, expected one or two names"
            )
        for argument in arguments:
            if argument.lower() not in known:
                raise _error(
                    path,
                    state,
                    f"the predicate {_text_of(state)} names {argument!r}, expected an object, a "
                    "fixture or a region of the file",
                )


def _goal_of(path: Path, section: Group) -> Iterator[Group]:
    """Return the predicates of a goal, which all have to hold."""
    if len(section) != 2 or not isinstance(section[1], Group):
        raise _error(path, section, "the goal is not one predicate, or one `(And ...)` of several")
    states = section[1][1:] if section[1].name == "and" else [section[1]]
    for state in states:
        if not isinstance(state, Group) or not state.name:
            raise _error(path, section, f"the goal holds {_text_of(state)}, expected a predicate")
        yield state


def _names_in(path: Path) -> set[str]:
    """Return the names that a goal may use: LIBERO joins that of a region to that of its target."""
    names: set[str] = set()
    for section in _sections(path):
        if section.name in (":objects", ":fixtures"):
            names |= {each.lower() for each in section[1:] if isinstance(each, str)}
        elif section.name == ":regions":
            for region in section[1:]:
                if not isinstance(region, Group) or not region.name:
                    raise _error(path, section, "a region has no name")
                targets = [
                    each[1]
                    for each in region[1:]
                    if isinstance(each, Group) and each.name == ":target" and len(each) == 2
                ]
                if len(targets) != 1 or not isinstance(targets[0], str):
                    raise _error(path, region, f"the region {region.name} has no `(:target NAME)`")
                names.add(f"{targets[0].lower()}_{region.name}")
    return names


def _sections(path: Path) -> list[Group]:
    """Return the groups of the file's `(define ...)`."""
    outer = Group()
    outer.line = 1
    open_groups = [outer]
    for number, line in enumerate(_lines_of(path), start=1):
        for token in _TOKEN.findall(line):
            if token == "(":
                group = Group()
                group.line = number
                open_groups[-1].append(group)
                open_groups.append(group)
            elif token != ")":
                open_groups[-1].append(token)
            elif len(open_groups) == 1:
                raise ValueError(f"{path}, line {number}: a bracket closes what was never opened.")
            else:
                open_groups.pop()
    if len(open_groups) > 1:
        raise _error(path, open_groups[-1], "a bracket that opens here is never closed")
    define = outer[0] if len(outer) == 1 else None
    if not isinstance(define, Group) or define.name != "define":
        raise ValueError(f"{path} is no goal file, expected one `(define ...)` and nothing else.")
    sections = [each for each in define[1:] if isinstance(each, Group)]
    if len(sections) != len(define) - 1 or not all(each.name for each in sections):
        raise _error(path, define, "`(define ...)` holds more than sections such as `(:goal ...)`")
    return sections


def _lines_of(path: Path) -> list[str]:
    """Return the lines of a file without comments."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}.") from error
    return [_COMMENT.sub("", line) for line in text.split("\n")]


def _text_of(node: Node) -> str:
    if isinstance(node, str):
        return node
    return f"({' '.join(map(_text_of, node))})"


def _error(path: Path, at: Group, what: str) -> ValueError:
    return ValueError(f"{path}, line {at.line}: {what}.")
