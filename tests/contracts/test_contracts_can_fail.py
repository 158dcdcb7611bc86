"""Each rule of `vla_rl.testing` is broken by an implementation that fails its test, in a plain pytest."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from broken_contracts import FAULTS

from vla_rl import testing
from vla_rl.testing import (
    ActionEngineContract,
    ActorContract,
    ChatEngineContract,
    EmbodiedEnvContract,
    PolicyContract,
)

SUPPORT = Path(__file__).parent / "support"

CONTRACTS = {
    "Envs": EmbodiedEnvContract,
    "Policies": PolicyContract,
    "ActionEngines": ActionEngineContract,
    "ChatEngines": ChatEngineContract,
    "Actors": ActorContract,
}


FIRST = {base.__name__: next(iter(faults)) for base, faults in FAULTS.items()}
"""One implementation for each contract: all of them take a minute of CPU time."""


def run_broken(folder: Path, *options: str) -> dict[str, set[str]]:
    """Return the failed tests of each class of `broken_contracts`, in a pytest without plugins."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", str(SUPPORT / "broken_contracts.py"), "-q", "-rfE"),
            *("-c", str(folder / "pytest.ini"), "--tb=line", "-p", "no:cacheprovider"),
            *("--noconftest", *options),
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "BROKEN_CONTRACTS_FOLDER": str(folder),
            "BROKEN_CONTRACTS_PID": "",  # set by this process's own import
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert "\nERROR" not in done.stdout, done.stdout[-5000:] + done.stderr[-3000:]
    found: dict[str, set[str]] = {}
    for name, test in re.findall(r"^FAILED \S*::Test(\w+)::(test_\w+)", done.stdout, re.MULTILINE):
        found.setdefault(name, set()).add(test)
    return found


def expected(faults: dict[type, dict[str, str]]) -> dict[str, set[str]]:
    return {
        f"{base.__name__}_{name}": {test}
        for base, broken in faults.items()
        for name, test in broken.items()
    }


def test_an_implementation_that_breaks_a_rule_fails_its_test(tmp_path: Path) -> None:
    wanted = {
        base: {name: test for name, test in faults.items() if name == FIRST[base.__name__]}
        for base, faults in FAULTS.items()
    }
    chosen = " or ".join(f"{kind}_{name}" for kind, name in FIRST.items())
    assert run_broken(tmp_path, "-k", chosen) == expected(wanted)


@pytest.mark.proof
def test_every_rule_is_broken_by_an_implementation_that_fails_its_test(tmp_path: Path) -> None:
    assert run_broken(tmp_path) == expected(FAULTS)


@pytest.mark.parametrize("kind", CONTRACTS)
def test_every_rule_has_an_implementation_that_breaks_it(kind: str) -> None:
    rules = {name for name in dir(CONTRACTS[kind]) if name.startswith("test_")}
    (faults,) = [faults for base, faults in FAULTS.items() if base.__name__ == kind]
    assert set(faults.values()) == rules


def test_without_pytest_the_contracts_name_what_is_missing() -> None:
    code = "import sys; sys.modules['pytest'] = None; import vla_rl.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "vla_rl.testing needs pytest; run `pip install pytest`." in done.stderr
    assert set(testing.__all__) >= {contract.__name__ for contract in CONTRACTS.values()}
