"""Find sentences that readers stumble over, in docstrings, messages and pages; the exit status is 1
if there is one.

    python scripts/check_prose.py                 the whole checkout
    python scripts/check_prose.py vla_rl/actors   some folders or files
    python scripts/check_prose.py --unchanged main vla_rl/actors    and that only prose differs from another commit

It looks for docstrings whose first line is a fragment ("Of ...", "Where ...", "What ..."),
"whoever" and other words for persons that stand for things, "in place of" for "instead of", "is
said" and "is told" for "is reported", and "where" for "if" after "Raises:". With `--unchanged`, the
syntax tree of each Python file, without its strings and comments, has to equal that of the commit.
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
    found = [line for path in _files(asked.paths) for line in _findings(path)]
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


def _findings(path: Path) -> Iterator[str]:
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
