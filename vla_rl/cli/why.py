"""Print what a running training run waits for: `vla-rl why runs/<run>`.

It asks the run's process, which answers also while its loop is blocked.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.text import Text
from rich.tree import Tree

from vla_rl.errors import ConfigError
from vla_rl.reporting import RunDirectory
from vla_rl.reporting.waits import ListedTask, ListedWait, NoAnswer, RunWaits, ask_run
from vla_rl.run.terminal import lasting_output
from vla_rl.util.values import plain_console

MOST_OF_A_KIND = 8
"""Waits of one kind that are listed singly; the others are counted."""


@lasting_output()
def main() -> int:
    """Print the tree; return the exit status: 1 if the run did not answer, 2 if it is no run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the folder of a running training run")
    try:
        run = RunDirectory.existing(parser.parse_args().run)
        waits = ask_run(run)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except NoAnswer as error:
        print(error, file=sys.stderr)
        return 1
    # a terminal wraps long lines itself; rich would cut them
    wide = plain_console(width=10_000, soft_wrap=True, highlight=False)
    wide.print(make_tree(waits, str(run.path)))
    return 0


def make_tree(waits: RunWaits, run: str) -> Tree:
    """Return who waits for whom as a tree, with tasks, threads and dead processes below."""
    counts = ", ".join(f"{what} {count}" for what, count in waits.progress.items())
    tree = _node(
        f"{run} (pid {waits.pid}): last progress {waits.quiet_s:.1f} s ago; so far: {counts}"
    )
    if waits.blocked_at is not None:
        blocked = tree.add(Text("the loop is blocked, and stands at:"))
        for line in waits.blocked_at.splitlines():
            blocked.add(Text(line.strip()))
    _add_waits(tree.add(Text("who waits for whom")), waits)
    _add_tasks(tree.add(Text("tasks of the loop")), waits.tasks)
    _add_tasks(tree.add(Text("other threads")), waits.threads)
    if waits.exits:
        dead = tree.add(Text("processes that ended unexpectedly, the newest first"))
        for ended in reversed(waits.exits):
            first, *stderr = ended.what.splitlines()
            branch = dead.add(Text(f"{ended.seconds:.1f} s ago: {first}"))
            for line in stderr:
                branch.add(Text(line.strip()))
    return tree


def _add_waits(tree: Tree, waits: RunWaits) -> None:
    awaited = {id(wait): _list_awaited(wait, waits.waits) for wait in waits.waits}
    below = {id(child) for children in awaited.values() for child in children}
    tasks = {task.name: task for task in waits.tasks}
    shown: set[int] = set()
    # two that wait for each other are below one another: whichever is left over is a root
    for wait in sorted(waits.waits, key=lambda each: id(each) in below):
        if id(wait) not in shown:
            _add_wait(tree, wait, awaited, tasks, shown)
    if not waits.waits:
        tree.add(Text("no task reports a wait"))


def _add_wait(
    tree: Tree,
    wait: ListedWait,
    awaited: dict[int, list[ListedWait]],
    tasks: dict[str, ListedTask],
    shown: set[int],
) -> None:
    shown.add(id(wait))
    branch = tree.add(Text(f"{wait.who} waits for {wait.on} since {wait.seconds:.1f} s"))
    if wait.process:
        branch.add(Text(wait.process))
    children = [child for child in awaited[id(wait)] if id(child) not in shown]
    for child in children[:MOST_OF_A_KIND]:
        _add_wait(branch, child, awaited, tasks, shown)
    if len(children) > MOST_OF_A_KIND:
        branch.add(Text(f"and {len(children) - MOST_OF_A_KIND} more"))
        shown.update(id(child) for child in children)
    named = {child.who for child in awaited[id(wait)]}
    for name in split_names(wait.on):
        if name in tasks and name not in named:
            branch.add(Text(f"{name} is at {tasks[name].at}"))


def _list_awaited(wait: ListedWait, others: Iterable[ListedWait]) -> list[ListedWait]:
    names = split_names(wait.on)
    return [other for other in others if other.who in names and other is not wait]


def split_names(text: str) -> list[str]:
    """Return what a wait names: `episodes 12, 13` is `episode 12` and `episode 13`."""
    return [
        f"{word} {number}"
        for word, numbers in re.findall(r"(\b[a-z]+?)s? (\d+(?:, \d+)*)", text)
        for number in numbers.split(", ")
    ]


def _add_tasks(tree: Tree, tasks: Sequence[ListedTask]) -> None:
    """Add a row for each line of code, with the tasks that stand there."""
    by_line: dict[str, list[str]] = {}
    for task in tasks:
        by_line.setdefault(task.at, []).append(task.name)
    for line, names in by_line.items():
        more = f" and {len(names) - MOST_OF_A_KIND} more" if len(names) > MOST_OF_A_KIND else ""
        tree.add(Text(f"{', '.join(names[:MOST_OF_A_KIND])}{more}: {line}"))


def _node(text: str) -> Tree:
    return Tree(Text(text))
