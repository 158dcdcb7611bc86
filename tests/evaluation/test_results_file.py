"""The file of an evaluation counts by suite, by change and by task, and says what is missing."""

import json
from pathlib import Path

from vla_rl.evaluation.results import EpisodeResult
from vla_rl.evaluation.results_file import title_of, write_results


def result(suite: str, task_id: int, is_success: bool, perturbation: str = "") -> EpisodeResult:
    return EpisodeResult(
        suite=suite,
        task_id=task_id,
        task=f"{suite}/{task_id}",
        instruction="go",
        init_state_id=0,
        scene_seed=0,
        is_success=is_success,
        num_steps=5,
        attempts=1,
        perturbation=perturbation,
    )


RESULTS = [
    result("goal", 1, True),
    result("object", 0, False),
    result("goal", 0, False),
    result("goal", 1, False, "swap"),
]


def test_rates_are_by_suite_change_and_task(tmp_path: Path) -> None:
    write_results(tmp_path / "results.json", {"seed": 0}, RESULTS, num_planned=6, num_missing=2)
    found = json.loads((tmp_path / "results.json").read_bytes())
    assert found["summary"]["success_rate"] == 0.25
    assert {name: part["episodes"] for name, part in found["suites"].items()} == {
        "goal": 3,
        "object": 1,
    }
    assert found["perturbations"]["swap"]["episodes"] == 1
    assert list(found["tasks"]) == ["goal/0", "goal/1", "object/0"]
    assert found["tasks"]["goal/1"]["successes"] == 1
    assert len(found["episodes"]) == 4
    assert (found["planned_episodes"], found["missing_episodes"]) == (6, 2)
    assert not found["is_complete"]
    assert found["conditions"] == {"seed": 0}
    assert found["versions"]


def test_a_title_names_checkpoint_and_conditions() -> None:
    conditions = {"assets": "stand-ins", "seed": 3, "libero": "plus"}
    assert title_of("mine", conditions, num_planned=4, num_missing=0) == (
        "mine, libero: plus, assets: stand-ins"
    )


def test_the_title_of_an_interrupted_evaluation_warns_of_its_rates() -> None:
    title = title_of("mine", {}, num_planned=4, num_missing=1)
    assert title.startswith("mine; incomplete: 3 of 4 episodes, those running were lost")
