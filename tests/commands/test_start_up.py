"""Help and errors of the command line do not wait for torch."""

import subprocess
import sys

import pytest

PROBE = """
import contextlib, io, sys
from importlib import import_module
from vla_rl.commands.main import recipes

shown, status = io.StringIO(), None
for name in {names}:
    sys.argv = ["vla-rl " + name, *{arguments}]
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            status = import_module("vla_rl.recipes." + name).cli()
        except SystemExit as stopped:
            status = stopped.code
print(status, sorted({{"torch", "transformers", "timm", "matplotlib", "vllm"}} & set(sys.modules)))
"""


def loaded_by(names: str, *arguments: str) -> str:
    """Run the recipes with these arguments in one new process; return the last exit status and the
    slow packages that they imported.
    """
    code = PROBE.format(names=names, arguments=list(arguments))
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return ran.stdout.strip()


def test_the_help_of_every_recipe_imports_no_network() -> None:
    assert loaded_by("recipes()", "--help") == "0 []"


def test_the_help_of_every_option_imports_no_network() -> None:
    assert loaded_by("recipes()", "--help-all") == "0 []"


@pytest.mark.parametrize(
    "arguments", [("--group-sise", "8"), ("--group-size", "0"), ("--pipeline", "embodied_spro")]
)
def test_an_error_in_the_options_imports_no_network(arguments: tuple[str, str]) -> None:
    assert loaded_by("['srpo_libero']", *arguments) == "2 []"
