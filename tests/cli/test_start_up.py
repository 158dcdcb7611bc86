"""Help and errors of the command line do not wait for torch."""

import json
import subprocess
import sys

PROBE = """
import contextlib, io, json, sys
from importlib import import_module
from vla_rl.cli.main import recipes

def status_of(name, *arguments):
    sys.argv = ["vla-rl " + name, *arguments]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            return import_module("vla_rl.recipes." + name).cli()
        except SystemExit as stopped:
            return stopped.code

slow = {"torch", "transformers", "timm", "matplotlib", "vllm"}
helps = [[name, "--help"] for name in recipes()] + [["srpo_libero", "--help-all"], ["grpo_text", "--help-all"]]
for command in helps + json.loads(sys.argv[1]):
    print(json.dumps([command, status_of(*command), sorted(slow & set(sys.modules))]))
"""

WRONG = [
    ["srpo_libero", "--group-sise", "8"],
    ["srpo_libero", "--group-size", "0"],
    ["srpo_libero", "--pipeline", "embodied_spro"],
]


def test_help_of_every_recipe_and_errors_in_its_options_import_no_network() -> None:
    """Ask one process for all of them: what any of them imports stays there to be seen."""
    ran = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(WRONG)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [line for line in lines if line[2]] == []
    statuses = {tuple(command): status for command, status, _ in lines}
    assert len(statuses) > 10 + 2 + len(WRONG)
    assert {command for command, status in statuses.items() if status != 0} == {
        tuple(command) for command in WRONG
    }
    assert {statuses[tuple(command)] for command in WRONG} == {2}
