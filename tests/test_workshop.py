"""The files that set up a machine agree with each other, wherever a checkout lies.

Versions, make targets, hosted CI: nothing depends on the name of a checkout or on the user who runs it.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
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
FILES = [
    path
    for folder in ("vla_rl", "tests", "benchmarks", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != Path(__file__)
]
OUR_PATHS = re.compile(r"/vla_rl(?![-\w.])")
PATH_OPTION = re.compile(r"--(?:resume|config|run-root|policy|python|no-deps|target|r) ")
AFTER_A_PATH_OPTION = re.compile(f"{PATH_OPTION.pattern}$")
"""The end of a text whose next word is a path that the reader is to paste into a shell."""

LOOK_FOR_OUR_NAME = {
    # `vla_rl/requirements` is in the package, whose own folder always has this name
    "tests/engines/vllm/test_adapter.py": 1,
}
QUOTED_BEFORE = {
    # the values as the user gave them, in a sentence
    ("vla_rl/cli/command_line.py", "known.config"),
    ("vla_rl/cli/command_line.py", "known.resume"),
    # a pin of a requirements file
    ("vla_rl/envs/libero/packages.py", "next("),
    ("vla_rl/engines/vllm/adapter.py", "DISTRIBUTIONS[build[0]]"),
    # quoted where it is made
    ("vla_rl/actors/processes/fork_servers.py", "_find_source()"),
}
RIGHTS_OF_ROOT = ("tmpfs(", "network_namespaces(", "os.setresuid(")


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


def trees(holding: re.Pattern[str]) -> Iterator[tuple[str, ast.Module]]:
    """Files with such a text; parsing all of them takes seconds."""
    for path in FILES:
        text = path.read_text()
        if holding.search(text):
            yield str(path.relative_to(ROOT)), ast.parse(text)


def comparisons_with_our_name(tree: ast.Module) -> list[int]:
    """Lines that compare or match with a text that holds our name as a folder of a path."""
    found = []
    for node in ast.walk(tree):
        asked: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in ("startswith", "endswith", "split", "partition", "rpartition", "find"):
                asked = node.args
            elif name in ("compile", "search", "match", "fullmatch", "findall", "sub"):
                asked = node.args[:1]
            asked = asked + [each.value for each in node.keywords if each.arg == "match"]
        texts = [
            part.value
            for each in asked
            for part in ast.walk(each)
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        if any(OUR_PATHS.search(text) and text.startswith(("/", "for CPUs")) for text in texts):
            found.append(node.lineno)
    return found


def test_a_path_is_told_by_the_folder_of_the_package_not_by_its_name() -> None:
    found = {path: comparisons_with_our_name(tree) for path, tree in trees(OUR_PATHS)}
    assert {path: len(lines) for path, lines in found.items() if lines} == LOOK_FOR_OUR_NAME, found


def test_a_path_in_a_command_to_paste_is_quoted_for_the_shell() -> None:
    unquoted, quoted = set(), 0
    for path, tree in trees(PATH_OPTION):
        if not path.startswith("vla_rl/"):
            continue
        for text in ast.walk(tree):
            if not isinstance(text, ast.JoinedStr):
                continue
            for before, value in zip(text.values, text.values[1:], strict=False):
                if (
                    isinstance(value, ast.FormattedValue)
                    and isinstance(before, ast.Constant)
                    and AFTER_A_PATH_OPTION.search(str(before.value))
                ):
                    made = ast.unparse(value.value)
                    if made.startswith("shlex."):
                        quoted += 1
                    elif not any(path == p and made.startswith(m) for p, m in QUOTED_BEFORE):
                        unquoted.add((path, made))
    assert unquoted == set()
    assert quoted >= 3


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in FILES
        if path.name.startswith("test_")
        and any(right in path.read_text() for right in RIGHTS_OF_ROOT)
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_what_takes_the_rights_of_root_is_marked(path: Path) -> None:
    assert "needs_root" in path.read_text()
