"""What the figures of a policy's skills count."""

from benchmarks.planner_skills import summarise_skills


def test_a_skill_counts_from_sixty_percent_of_the_starts_that_exist() -> None:
    line = {"run": "libero_goal/7", "alone": "11100", "after": {"0": "1-1", "2": "100"}}
    found = summarise_skills([line, {**line, "run": "libero_goal/8", "alone": "10100"}])
    assert found["alone"] == {"libero_goal/7": 60.0, "libero_goal/8": 40.0}
    assert found["after_another"]["libero_goal/7"] == 60.0
    assert (found["skills"], found["skills_above_60"]) == (2, 1)
    assert found["skills_above_60_after_another"] == 2
