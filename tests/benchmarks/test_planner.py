"""What the figures of a planner and its robot count."""

from benchmarks.flow_runs import join_outcomes
from benchmarks.planner_learning import compare_runs
from benchmarks.planner_skills import summarise_skills


def test_a_skill_counts_from_sixty_percent_of_the_starts_that_exist() -> None:
    line = {"run": "libero_goal/7", "alone": "11100", "after": {"0": "1-1", "2": "100"}}
    found = summarise_skills([line, {**line, "run": "libero_goal/8", "alone": "10100"}])
    assert found["alone"] == {"libero_goal/7": 60.0, "libero_goal/8": 40.0}
    assert found["after_another"]["libero_goal/7"] == 60.0
    assert (found["skills"], found["skills_above_60"]) == (2, 1)
    assert found["skills_above_60_after_another"] == 2


def test_runs_are_compared_request_by_request_where_a_seed_has_both() -> None:
    after = {"both/0": "1110", "planner/0": "1000", "both/1": "1111", "robot/2": "0000"}
    lines = [
        {
            "run": run,
            "outcomes_after": {"wordings/2 skills": each[2:], "combinations/2 skills": each[:2]},
        }
        for run, each in after.items()
    ]
    assert join_outcomes(lines[0], "after") == "1110"
    found = compare_runs(lines, "both", "planner")
    assert found is not None
    points, low, high = found
    assert points == 50.0
    assert low < points < high
    assert compare_runs(lines, "both", "robot") is None
