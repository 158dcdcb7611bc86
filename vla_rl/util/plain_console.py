"""A console that prints names and paths as they are.

rich reads brackets in a string as markup and `:words:` as emoji: a task named "open [the] box" loses
a word, and one that holds "[/x]" ends the run with a MarkupError at its summary.
"""

from typing import Any

from rich.console import Console


def plain_console(**options: Any) -> Console:
    """Return a console that takes strings literally, in tables too.

    Args:
        options: those of `rich.console.Console`.
    """
    return Console(markup=False, emoji=False, **options)
