"""Requests of several goals in a scene of LIBERO: what they ask for can be done, held-out ones are new.

Progress, order, what must not be, the scene in words.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from vla_rl.envs.libero.request_env import (
    UNDONE_STEPS,
    LiberoRequestEnv,
    check_request,
    name_in_words,
)
from vla_rl.envs.libero.requests import (
    SKILLS,
    SPARED,
    draw_requests,
    list_combinations,
)
from vla_rl.envs.libero.task_files import read_goals
from vla_rl.envs.libero.tasks import find_task, list_tasks

STOVE, DRAWER = "turnon flat_stove_1", "open wooden_cabinet_1_middle_region"
IDLE = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)

NUM = 400


@pytest.fixture(scope="module")
def make_env() -> Iterator[Any]:
    """One scene for all requests, which a process prepares once."""
    settings: dict[str, Any] = {"image_size": 32, "physics": "fast", "quality": "fast"}
    LiberoRequestEnv.prepare("libero_goal", 0, image_size=32, quality="fast")
    made: list[LiberoRequestEnv] = []

    def make(**request: Any) -> LiberoRequestEnv:
        while made:
            made.pop().close()
        made.append(LiberoRequestEnv("tidy up", **settings, **request))
        made[0].reset(options={"init_state_id": 2})
        return made[0]

    yield make
    made.pop().close()


def set_joint(env: LiberoRequestEnv, name: str, value: float) -> None:
    model, data = env.scene.model, env.scene.data
    joint = next(j for j in range(model.njnt) if model.joint(j).name == name)
    data.qpos[model.jnt_qposadr[joint]] = value
    data.qvel[model.jnt_dofadr[joint]] = 0.0


def turn_knob(env: LiberoRequestEnv, angle: float = 1.0) -> tuple[float, bool, dict[str, Any]]:
    set_joint(env, "flat_stove_1_button", angle)
    return _step(env)


def pull_drawer(env: LiberoRequestEnv, out: float = -0.15) -> tuple[float, bool, dict[str, Any]]:
    set_joint(env, "wooden_cabinet_1_middle_level", out)
    return _step(env)


def _step(env: LiberoRequestEnv) -> tuple[float, bool, dict[str, Any]]:
    _, reward, terminated, _, info = env.step(IDLE)
    return reward, terminated, info


def test_each_goal_is_progress_and_success_does_not_end_the_episode(make_env: Any) -> None:
    env = make_env(goals=[DRAWER, STOVE])
    _, start = env.reset(options={"init_state_id": 2})
    assert (start["request"], start["is_success"], start["scene"]) == ("tidy up", False, [])
    assert "turn on the stove" in start["skills"]
    assert len(start["skills"]) == 10
    reward, _, info = turn_knob(env)
    assert (reward, info["is_success"], info["goals"]) == (0.5, False, [False, True])
    assert info["scene"] == ["The flat stove is on."]
    reward, terminated, info = pull_drawer(env)
    assert (reward, terminated, info["is_success"]) == (0.5, False, True)
    assert info["scene"] == [
        "The middle region of the wooden cabinet is open.", "The flat stove is on.",
    ]  # fmt: skip
    reward, _, info = turn_knob(env, 0.0)
    assert (reward, info["is_success"]) == (-0.5, False)


def test_a_policy_reads_the_request_and_not_the_task_whose_scene_it_is(make_env: Any) -> None:
    env = make_env(goals=[STOVE])
    told = env.step(IDLE)[0]["instruction"]
    assert told == "tidy up"
    assert env.observation_space["instruction"].contains(told)
    before = env.observation_space
    other = make_env(goals=[STOVE, DRAWER])
    # a vector environment takes environments of one space
    assert other.observation_space == before


def test_the_hand_goes_home_once_something_is_newly_true(make_env: Any) -> None:
    env = make_env(goals=[DRAWER, STOVE])
    home = env.reset(options={"init_state_id": 2})[0]["state"][:3]

    def lower_hand() -> Any:
        for _ in range(12):
            env.step(np.array([0.5, 0.5, -1, 0, 0, 0, 1], np.float32))
        return env.step(IDLE)

    away, _, _, _, info = lower_hand()
    assert np.linalg.norm(away["state"][:3] - home) > 0.1
    before = info["num_steps"]
    env.render_every_step = False  # inside of a chunk
    assert turn_knob(env)[2]["num_steps"] == before + 1
    env.render_every_step = True
    back, _, _, _, info = env.step(IDLE)
    assert np.linalg.norm(back["state"][:3] - home) < 0.03
    assert back["state"][-2] > 0.037  # the fingers are open
    assert info["num_steps"] > before + 20  # the way home counts
    # what was told once sends the hand home no more
    assert np.linalg.norm(lower_hand()[0]["state"][:3] - home) > 0.1


def test_the_way_home_ends_at_the_step_limit(make_env: Any) -> None:
    env = make_env(goals=[DRAWER], step_limit=20)
    for _ in range(12):
        env.step(np.array([0.5, 0.5, -1, 0, 0, 0, 1], np.float32))
    set_joint(env, "wooden_cabinet_1_middle_level", -0.15)
    _, reward, _, truncated, info = env.step(IDLE)
    assert (reward, truncated, info["num_steps"]) == (1.0, True, 20)


def test_in_an_order_the_later_goal_counts_only_after_the_earlier_one(make_env: Any) -> None:
    env = make_env(goals=[STOVE, DRAWER], in_order=True)
    assert pull_drawer(env)[0] == 0.0
    reward, _, info = turn_knob(env)
    assert (reward, info["is_success"]) == (0.5, False)  # the drawer was open before
    assert pull_drawer(env, 0.0)[0] == 0.0
    assert pull_drawer(env)[2]["is_success"] is False  # a drawer that bounces was not shut
    pull_drawer(env, 0.0)
    assert [_step(env)[0] for _ in range(UNDONE_STEPS)] == [0.0] * UNDONE_STEPS
    reward, _, info = pull_drawer(env)
    assert (reward, info["is_success"]) == (0.5, True)


def test_what_is_forbidden_takes_progress_away_and_is_no_success(make_env: Any) -> None:
    env = make_env(goals=[DRAWER], forbidden=[STOVE])
    assert pull_drawer(env)[2]["is_success"]
    reward, _, info = turn_knob(env)
    assert (reward, info["is_success"]) == (-1.0, False)


def test_a_state_continues_with_the_order_in_which_goals_came_true(make_env: Any) -> None:
    env = make_env(goals=[STOVE, DRAWER], in_order=True)
    pull_drawer(env)
    saved = env.get_state()
    turn_knob(env)
    pull_drawer(env, 0.0)
    env.set_state(saved)
    assert turn_knob(env)[2]["is_success"] is False
    with pytest.raises(ValueError, match="0 goals, expected 2: one of the same request"):
        env.set_state({key: value for key, value in saved.items() if key != "came_true"})


def test_a_request_whose_objects_are_not_in_the_scene_is_refused_without_the_simulator() -> None:
    task = find_task("libero_goal", 0)
    check_request(task, [STOVE, DRAWER], ["on plate_1 flat_stove_1_cook_region"])
    with pytest.raises(
        ValueError, match="names 'ketchup_1', which is not in the scene of libero_goal/0"
    ):
        check_request(task, ["on ketchup_1 plate_1"])
    with pytest.raises(ValueError, match="'fly plate_1' is none of on with 2 names"):
        check_request(task, ["fly plate_1"])
    with pytest.raises(ValueError, match="has no goals"):
        check_request(task, [])


@pytest.mark.parametrize("request_words", ["", 42, None])
def test_a_request_without_words_is_refused(request_words: Any) -> None:
    with pytest.raises(ValueError, match="request or goals are missing"):
        LiberoRequestEnv(request_words, goals=[STOVE])


def test_names_of_objects_and_regions_are_words() -> None:
    assert name_in_words("akita_black_bowl_1") == "akita black bowl"
    assert name_in_words("wooden_cabinet_1_top_side") == "top side of the wooden cabinet"


@pytest.mark.parametrize(
    ("predicate", "expected"),
    [
        ("open plate_1", "wooden_cabinet_1, wooden_cabinet_1_bottom_region, .*"),
        ("open wine_rack_1", "wooden_cabinet_1, wooden_cabinet_1_bottom_region, .*"),
        ("close wooden_cabinet_1_top_side", "wooden_cabinet_1, wooden_cabinet_1_bottom_region, .*"),
        ("turnon plate_1", "flat_stove_1"),
        # LIBERO fails at this one only once the cheese touches the bowl
        ("in cream_cheese_1 akita_black_bowl_1", "flat_stove_1_cook_region, .*"),
    ],
)
def test_a_predicate_that_libero_cannot_evaluate_is_named_before_the_first_episode(
    predicate: str, expected: str
) -> None:
    told = rf"'{predicate}' cannot be evaluated .* expected as its last name one of {expected}$"
    scene: dict[str, Any] = {"image_size": 32, "quality": "fast"}
    with pytest.raises(ValueError, match=told):
        LiberoRequestEnv.prepare(goals=[STOVE, predicate], request="tidy up", **scene)
    with pytest.raises(ValueError, match=told):
        LiberoRequestEnv("tidy up", [STOVE], [predicate], **scene)


def test_the_kind_of_a_thing_is_no_thing_of_the_scene() -> None:
    with pytest.raises(ValueError, match="names 'plate', which is not in the scene"):
        check_request(find_task("libero_goal", 0), ["on akita_black_bowl_1 plate"])


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
