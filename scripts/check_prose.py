"""Find sentences that readers stumble over in docstrings, messages and pages, besides names that
nobody would search for; the exit status is 1 if there is one.

    python scripts/check_prose.py                 the whole checkout
    python scripts/check_prose.py vla_rl/actors   some folders or files
    python scripts/check_prose.py --unchanged main vla_rl/actors    and that only prose differs from another commit

It looks for docstrings whose first line is a fragment ("Of ...", "Where ...", "What ..."),
"whoever" and other words for persons that stand for things, "in place of" for "instead of", "is
said" and "is told" for "is reported", and "where" for "if" after "Raises:".

Names of files, classes, functions, parameters, attributes and variables have to use the field's
words; `FIELD_WORDS` says which ones. With `--unchanged`, the syntax tree of each Python file,
without its strings and comments, has to equal that of the commit.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
DEFAULT: Final = (
    "vla_rl",
    "benchmarks",
    "scripts",
    "tests",
    "docs",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
)

FRAGMENT: Final = re.compile(r"(Of|What|Who|Whose|Where|As|By|For|From|On|Until|Nothing|Nobody) ")
SENTENCE: Final = re.compile(r"(?:^|[.:;] )Of [a-z]")
WORDS: Final = re.compile(
    r"\b(whoever|nobody|everybody|so many|in place of|(?:is|are) (?:said|told)|expected one:)\b|Raises: [^.]*\bwhere\b",
    re.I,
)


# The left words stood for these things in this project alone: whoever searched for an evaluator or an
# image did not find a judge or a picture. A plural counts as its singular.
FIELD_WORDS: Final = {
    "picture": "image",
    "play": "run_episode",
    "plays": "run_episode",
    "played": "run, or what ran",
    "playing": "running",
    "player": "runner",
    "judge": "evaluate, or value of a critic",
    "judged": "evaluated, or values",
    "judging": "evaluating",
    "taught": "trained",
    "teach": "train",
    "teaches": "trains",
    "lesson": "batch, or demonstration",
    "depot": "object store",
    "deposit": "reference",
    "shelf": "cache",
    "shelved": "cached",
    "entrance": "server socket",
    "gatekeeper": "authenticator",
    "keeper": "what it keeps: pool, runner, supervisor",
    "giver": "sender",
    "taker": "receiver",
    "neighbouring": "peer",
    "finding": "result",
    "roster": "agent names",
    "outlet": "writer",
    "streak": "retries",
    "dialect": "convention",
    "unsound": "not finite",
    "birth": "start",
}
# These words are usual in a sentence, so the name of a test may have them.
NAMES_ONLY: Final = {
    "loan": "copy",
    "lend": "copy",
    "lent": "copied",
    "borrow": "copy",
    "borrowed": "copied",
    "delivery": "hop",
    "adopt": "load, or apply",
    "adopted": "loaded, or applied",
    "adoption": "loading",
    "forgive": "extend",
    "worn": "expired",
    "patient": "machine",
    "spelt": "format",
    "talk": "conversation",
    "heard": "received, or input tokens",
    "speaking": "completing",
    "begun": "started, or eager",
    "dismiss": "stop",
    "vacate": "retire",
    "place": "offset, slot, device, host, index or path",
    "placed": "the same",
    "seat": "assignment",
    "far": "host, or remote",
    "here": "local",
    "elsewhere": "remote",
    "beside": "concurrent, background or extra",
    "door": "server socket",
    "arrive": "receive",
    "arrived": "received",
    "arrival": "return, or wait",
    "meeting": "rendezvous",
    "pulse": "heartbeat",
    "zap": "authenticator",
    "meter": "counter, or metrics",
    "unread": "unused",
    "absent": "missing",
}
STANDS_FOR_ITSELF: Final = {
    "in_place": "torch and NumPy say so of what overwrites its input",
    "_in_place": "as `in_place`",
    "is_in_place": "as `in_place`",
    "_IN_PLACE_FROM": "as `in_place`",
    "pick_and_place": "the manipulation task of that name",
    "Door": "a door of LIBERO's kitchens, as are the next ones",
    "door": "as `Door`",
    "doors": "as `Door`",
    "open_door": "as `Door`",
    "close_door": "as `Door`",
    "_BELOW_DOOR_TOP_M": "as `Door`",
    "_BEFORE_DOOR_M": "as `Door`",
    "_DOOR_TURN_PER_STEP": "as `Door`",
    "_DOOR_OVERSHOOT": "as `Door`",
    "zap_domain": "ZeroMQ's name of the argument",
    "_unread_bytes": "bytes that the reader of a stream has not read yet",
    "besides": "in addition to; no plural of `beside`",
    "unread_tokens": "tokens that the model has not read yet",
}
"""Names with such a word that mean what it says, each with the reason. Keys in files and on wires
are texts, not names: files of earlier versions are read, NavSim's and CARLA's keep `pictures`."""
PARTS: Final = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")


def main() -> int:
    """Print every place. Return 1 if there is one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "paths", nargs="*", default=[path for path in DEFAULT if (ROOT / path).exists()]
    )
    parser.add_argument(
        "--unchanged",
        metavar="COMMIT",
        help="also compare the code, without its prose, with this commit",
    )
    asked = parser.parse_args()
    found = [
        line for path in _files(asked.paths) for line in (*check_prose(path), *check_names(path))
    ]
    if asked.unchanged is not None:
        found += [line for path in _files(asked.paths) for line in _changes(path, asked.unchanged)]
    print("\n".join(found))
    print(f"{len(found)} places" if found else "no place found", file=sys.stderr)
    return int(bool(found))


def _files(paths: list[str]) -> Iterator[Path]:
    for name in paths:
        path = ROOT / name
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (
            file
            for file in files
            if file.suffix in (".py", ".md") and file != Path(__file__).resolve()
        )


def check_prose(path: Path) -> Iterator[str]:
    """Yield what is wrong in the sentences of a page or a module; tests may write as they like."""
    if path.is_relative_to(ROOT / "tests"):
        return
    text = path.read_text()
    texts = _strings(text) if path.suffix == ".py" else _paragraph_lines(text)
    for line, words, is_docstring in texts:
        first = words.strip().partition("\n")[0]
        if is_docstring and FRAGMENT.match(first):
            yield f"{path.relative_to(ROOT)}:{line}: a fragment: {first}"
        elif (
            match := WORDS.search(words) or (not is_docstring and SENTENCE.search(words))
        ) is not None and match:
            yield f"{path.relative_to(ROOT)}:{line}: {match[0]!r}: {first}"


def check_names(path: Path) -> Iterator[str]:
    """Yield the names of a module, and of its file, in words that the field does not use."""
    if path.suffix != ".py":
        return
    where = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    for line, name in [(1, path.stem), *sorted(set(_defined_names(ast.parse(path.read_text()))))]:
        words = FIELD_WORDS if name.startswith("test_") else FIELD_WORDS | NAMES_ONLY
        for part in PARTS.findall(name) if name not in STANDS_FOR_ITSELF else ():
            word = words.get(part.lower()) or words.get(part.lower().removesuffix("s"))
            if word is not None:
                yield f"{where}:{line}: the name {name!r} says {part!r}, the field says {word!r}"


def _defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def _strings(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield lines, texts, and whether they are docstrings (of a module, class, function, or the
    field above).
    """
    tree = ast.parse(text)
    documentation = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value, id(node) in documentation


def _paragraph_lines(text: str) -> Iterator[tuple[int, str, bool]]:
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, line, False


def _changes(path: Path, commit: str) -> Iterator[str]:
    if path.suffix != ".py":
        return
    name = path.relative_to(ROOT)
    before = subprocess.run(
        ["git", "show", f"{commit}:{name}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if before.returncode == 0 and _code_of(before.stdout) != _code_of(path.read_text()):
        yield f"{name}: more than its prose differs from {commit}"


def _code_of(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
        elif isinstance(node, ast.JoinedStr):
            # the values stay, in order, and the words between them go
            node.values = [value for value in node.values if isinstance(value, ast.FormattedValue)]
    return ast.dump(tree)


if __name__ == "__main__":
    sys.exit(main())
