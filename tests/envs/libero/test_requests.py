"""Requests in words: what they ask for can be done in the scene, and held-out ones were never trained on."""

import itertools

from vla_rl.envs.libero.request_env import check_request
from vla_rl.envs.libero.requests import (
    SKILLS,
    SPARED,
    draw_requests,
    list_combinations,
)
from vla_rl.envs.libero.task_files import read_goals
from vla_rl.envs.libero.tasks import find_task, list_tasks

NUM = 400


def test_every_goal_can_hold_in_the_scene_and_each_task_of_the_suite_is_a_skill() -> None:
    for split in ("train", "wordings", "combinations"):
        for request in draw_requests(split, NUM):
            check_request(find_task("libero_goal", 0), request.goals, request.forbidden)
            assert 2 <= len(request.goals) <= 3
            assert not set(request.goals) & set(request.forbidden)
    tasks = {
        " ".join(goal) for each in list_tasks("libero_goal") for goal in read_goals(each.goal_file)
    }
    assert {skill.goal for skill in SKILLS} == tasks


def test_held_out_combinations_are_never_trained_on() -> None:
    def goals(split: str) -> set[frozenset[str]]:
        return {frozenset(each.goals) for each in draw_requests(split, NUM)}  # type: ignore[arg-type]

    assert not goals("train") & goals("combinations")
    assert not goals("wordings") & goals("combinations")
    trained, held_out = (list_combinations(held_out=each) for each in (False, True))
    assert 0.15 < len(held_out) / (len(trained) + len(held_out)) < 0.4


def test_held_out_wordings_are_never_trained_on() -> None:
    kept = [ways[-1] for skill in SKILLS for ways in (skill.wordings, skill.others_words)] + [
        ways[-1] for _, _, ways in SPARED
    ]
    for split in ("train", "combinations"):
        words = [each.request for each in draw_requests(split, NUM)]  # type: ignore[arg-type]
        assert not any(each in request for each, request in itertools.product(kept, words))
    for request in draw_requests("wordings", NUM):
        assert any(each in request.request for each in kept)


def test_no_wording_is_that_of_two_skills() -> None:
    wordings = [each for skill in SKILLS for each in (*skill.wordings, *skill.others_words)]
    assert len(set(wordings)) == len(wordings)


def test_things_are_moved_once_in_a_request() -> None:
    for skills in list_combinations(held_out=False):
        moved = [thing for skill in skills for thing in skill.moves]
        assert len(set(moved)) == len(moved)


def test_the_order_of_the_goals_is_that_of_the_words() -> None:
    requests = draw_requests("train", NUM)
    assert {request.in_order for request in requests} == {True, False}
    for request in requests:
        if len(request.goals) == 2 and request.in_order:
            words = {
                goal: next(
                    (
                        request.request.index(each)
                        for skill in SKILLS
                        for each in (*skill.wordings, *skill.others_words)
                        if skill.goal == goal and each in request.request
                    ),
                    -1,
                )
                for goal in request.goals
            }
            first, second = (words[goal] for goal in request.goals)
            is_reversed = (
                ", but before that " in request.request or "before you " in request.request
            )
            assert (first > second) == is_reversed, request.request


def test_the_same_seed_draws_the_same_requests() -> None:
    assert draw_requests("train", 20, seed=3) == draw_requests("train", 20, seed=3)
    assert draw_requests("train", 20, seed=3) != draw_requests("train", 20, seed=4)
