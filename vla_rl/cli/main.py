"""The program `vla-rl`: run recipes by name, and install what pip alone does not.

vla-rl                            list the recipes
vla-rl srpo_libero --dry-run      the same as python -m vla_rl.recipes.srpo_libero --dry-run
vla-rl srpo --env metaworld       the same as vla-rl srpo_metaworld
vla-rl report runs/<run>          write the report of a run again
vla-rl why runs/<run>             what a running run waits for, as a tree
vla-rl doctor                     what would go wrong on this machine; --checkpoint FOLDER looks at a policy too
vla-rl serve CHECKPOINT           serve a policy to robots and benchmarks (openpi's protocol)
vla-rl compare EVAL EVAL          two evaluations start by start: the difference with its interval
vla-rl replay show RUN            what a replay buffer holds; check reads every byte, export writes its rows
vla-rl host                       let this machine run episodes for another one
vla-rl export carla DIR           files for the machine with CARLA, or with navsim: `vla-rl export navsim DIR`
vla-rl install libero             LIBERO; `vla-rl install --help` lists the others
vla-rl --version                  the version of this package
"""

import ast
import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

import vla_rl
from vla_rl.run.terminal import lasting_output

RECIPES: Final = Path(__file__).parents[1] / "recipes"
COMMANDS: Final = {
    "report": "vla_rl.cli.report",
    "doctor": "vla_rl.cli.doctor.checks",
    "export": "vla_rl.cli.export",
    "host": "vla_rl.cli.host",
    "install": "vla_rl.cli.install",
    "replay": "vla_rl.cli.replay",
    "serve": "vla_rl.cli.serve",
    "compare": "vla_rl.cli.compare",
    "why": "vla_rl.cli.why",
}
"""Modules of the commands that are no recipes; each has a `main`."""


def recipes() -> dict[str, str]:
    """Return the first sentence of each recipe that can be run, by name."""
    found = {}
    for path in sorted(RECIPES.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in text:
            # the docstring alone: of all files, the parser would need a third of a second
            head = text[: text.index('"""', 3) + 3] if text.startswith('"""') else text
            first_line = (ast.get_docstring(ast.parse(head)) or "").partition("\n")[0]
            found[path.stem] = first_line.partition(": `")[0].rstrip(":")
    return found


@lasting_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe or command that the arguments name; return the exit status."""
    name, *others = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(_overview())
        return 0
    if name == "--version":
        print(f"vla-rl {vla_rl.__version__}")
        return 0
    known = recipes()
    name, others = _with_env(name, others)
    if name not in known and name not in COMMANDS:
        near = difflib.get_close_matches(name, [*known, *COMMANDS], n=1)
        print(
            "error: vla-rl has no recipe "
            f"{name!r}{f', did you mean {near[0]!r}?' if near else ''}; `vla-rl` lists them",
            file=sys.stderr,
        )
        return 2
    sys.argv = [f"vla-rl {name}", *others]  # `--help` shows this name too
    # An installed program does not look where it is called, as `python -m` does: environments and
    # scorers of your own are there. At the end, so that they hide nothing that is installed.
    if not {"", os.getcwd()} & {*sys.path} and not sys.flags.safe_path:
        sys.path.append(os.getcwd())
    # imported only now: the list of recipes must not wait for what one of them needs
    if name in COMMANDS:
        status: int = import_module(COMMANDS[name]).main()
    else:
        status = import_module(f"vla_rl.recipes.{name}").cli()
    return status


def _with_env(name: str, others: list[str]) -> tuple[str, list[str]]:
    """Return the recipe that `srpo --env metaworld` names, and the other options.

    An algorithm's recipes have one name for each kind of environment, because their options differ.
    """
    option, *rest = others or [""]
    env = option.removeprefix("--env=")
    if option == "--env" and rest:
        env, *rest = rest
    elif env == option:
        return name, others
    return f"{name}_{env}", rest


def _overview() -> str:
    known = recipes()
    width = max(map(len, known))
    rows = [f"  {name:<{width}}  {sentence}" for name, sentence in known.items()]
    return "\n".join([__doc__.strip(), "", "Recipes:", *rows, "", "Each has --help and --dry-run."])


if __name__ == "__main__":
    sys.exit(main())
