"""The statements of a source text, without the expressions in them, which are most of its tree."""

import ast
from collections.abc import Iterator

BODIES = ("body", "orelse", "finalbody", "handlers", "cases")


def statements_in(text: str) -> Iterator[ast.AST]:
    """Yield each statement of a module, also those in functions, classes and branches."""
    left: list[ast.AST] = [ast.parse(text)]
    while left:
        node = left.pop()
        yield node
        for name in BODIES:
            left += getattr(node, name, ())
