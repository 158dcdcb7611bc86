"""The recipe of a planner and a robot: its requests are drawn or read, checked before anything starts, and run."""

import itertools
import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.planner_words import run_requests
from vla_rl.cli import dry_run
from vla_rl.cli.command_line import Command, TrainingLaunch, parse_command
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.libero.request_env import list_skills
from vla_rl.envs.libero.requests import draw_requests
from vla_rl.envs.libero.task_files import read_goals
from vla_rl.envs.libero.tasks import find_task, list_tasks
from vla_rl.errors import ConfigError, DataError
from vla_rl.models.shipped import GOAL_PLANNER
from vla_rl.recipes.grpo_planner import (
    GrpoPlannerConfig,
    find_other_images,
    main,
    make_team,
    one_env_of_each_scene,
    read_requests,
    training_agent,
    training_starts,
    validation_agent,
    validation_starts,
)
from vla_rl.recipes.request_plans import NUM_REQUESTS, demonstrate_plan
from vla_rl.reporting import read_metrics
from vla_rl.types import (
    EnvSpec,
    Sampling,
)

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^python -m vla_rl\.recipes\.grpo_planner(.*?)#", PAGE, re.MULTILINE)
SMALL = [
    *("--run.updates", "1", "--group-size", "2", "--scheduler.groups-per-update", "1"),
    *("--simulators.num-envs", "1", "--num-validation", "0"),
    *("--step-limit", "24", "--planner.max-call-steps", "8", "--planner.max-turns", "2"),
    *("--assets", "stand-ins", "--run.device", "cpu"),
]


def parsed(*words: str) -> Command[TrainingLaunch, GrpoPlannerConfig]:
    return parse_command(TrainingLaunch, GrpoPlannerConfig, "", list(words))


def write_requests(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("rest", COMMANDS)
def test_a_command_of_the_page_is_understood(rest: str) -> None:
    words = shlex.split(rest)
    config = parsed(*words).config
    for option, value in zip(words[::2], words[1::2], strict=True):
        found: Any = config
        for field in option.removeprefix("--").replace("-", "_").split("."):
            found = getattr(found, field)
        assert str(found) == value


def test_another_pipeline_keeps_the_credit_of_planner_and_robot() -> None:
    for pipeline in ("grpo", "dapo", "embodied_grpo"):
        config = parsed("--pipeline", pipeline).config
        assert (config.advantage.name, config.reward.function) == (
            "hierarchical_rloo", "environment",
        )  # fmt: skip
    assert parsed("--advantage.name", "grpo").config.advantage.name == "grpo"


@pytest.mark.parametrize(
    ("options", "has_means", "in_training", "in_validation"),
    [
        ("", True, False, True),
        ("--learns robot", True, False, True),
        ("--learns planner", True, True, True),
        ("--learns planner", False, False, False),
        ("--learns planner --planner.robot-by-mean False", True, False, False),
    ],
)
def test_a_robot_acts_by_means_where_it_does_not_learn(
    options: str, has_means: bool, in_training: bool, in_validation: bool
) -> None:
    config, robot = parsed(*options.split()).config, SimpleNamespace(has_token_means=has_means)
    for agent, expected in (
        (training_agent(config, robot), in_training),
        (validation_agent(config, robot), in_validation),
    ):
        assert agent.keywords["planner"].robot_by_mean is expected


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("", "robot_by_mean is True, but learns is 'both'"),
        (
            "--learns planner",
            r"but a SimpleNamespace does not choose .*\(--planner.robot-by-mean False\)",
        ),
    ],
)
def test_means_of_a_robot_that_learns_or_has_none_are_refused(options: str, told: str) -> None:
    config = parsed(*options.split(), "--planner.robot-by-mean", "True").config
    with pytest.raises(ConfigError, match=told):
        training_agent(config, SimpleNamespace(has_token_means=False))


def test_training_and_held_out_requests_share_no_start() -> None:
    config = parsed().config
    trained, held_out = training_starts(config), validation_starts(config)
    assert (len(trained), len(held_out)) == (256, 40)
    assert {start.task for start in held_out} <= {
        f"{split}/{num} skills" for split in ("wordings", "combinations") for num in (2, 3)
    }
    assert not {start.options["init_state_id"] for start in trained} & {
        start.options["init_state_id"] for start in held_out
    }
    assert not {start.env.kwargs["request"] for start in trained} & {
        start.env.kwargs["request"] for start in held_out
    }


def test_own_requests_are_read_with_their_order_and_what_they_forbid(tmp_path: Path) -> None:
    row = {"request": "light it", "goals": ["turnon flat_stove_1"], "in_order": True}
    file = write_requests(tmp_path / "own.jsonl", row, row)
    (first, _) = read_requests(file)
    assert (first.request, first.goals, first.in_order) == (
        "light it", ("turnon flat_stove_1",), True,
    )  # fmt: skip


def test_own_held_out_requests_are_run_from_held_out_starts(tmp_path: Path) -> None:
    row = {"request": "light it", "goals": ["turnon flat_stove_1"]}
    file = write_requests(tmp_path / "own.jsonl", row, {**row, "request": "turn it on"})
    starts = validation_starts(parsed("--validation-requests", file).config)
    assert [start.env.kwargs["request"] for start in starts] == ["light it", "turn it on"]
    assert [start.options["init_state_id"] for start in starts] == [40, 41]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"goals": ["on ketchup_1 plate_1"]}, r"row 1: .*'ketchup_1', which is not in the scene"),
        ({"goals": ["fetch plate_1"]}, r"row 1: the predicate 'fetch plate_1' is none of"),
        ({"goals": "turnon flat_stove_1"}, r"row 1: Expected `array`, got `str` - at `\$.goals`"),
        ({"goals": []}, r"row 1: the request has no goals"),
        ({"request": " ", "goals": ["turnon flat_stove_1"]}, r"row 1: the request has no words"),
        (
            {"goals": ["turnon flat_stove_1"], "forbidden": ["turnon  flat_stove_1"]},
            r"row 1: 'turnon flat_stove_1' is a goal and forbidden",
        ),
        ({"goals": ["turnon flat_stove_1"], "never": []}, r"row 1: .*unknown field `never`"),
    ],
)
def test_a_request_that_cannot_be_fulfilled_is_refused_before_anything_starts(
    tmp_path: Path, row: dict[str, Any], told: str
) -> None:
    good = {"request": "light it", "goals": ["turnon flat_stove_1"]}
    file = write_requests(tmp_path / "own.jsonl", good, {"request": "do it", **row})
    with pytest.raises(ConfigError, match=told):
        read_requests(file)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--learns robot --planner-optimizer.lr 1e-3", "planner_optimizer.* learns is 'robot'"),
        ("--learns planner --learner.optimizer.lr 1e-3", "learner.optimizer.* planner_optimizer"),
        ("--requests own.jsonl --num-requests 9", "num_requests is 9.* requests is 'own.jsonl'"),
        (
            "--validation-requests own.jsonl --num-validation 9",
            "num_validation is 9.* validation_requests is 'own.jsonl'",
        ),
    ],
)
def test_options_that_nothing_would_read_are_refused(options: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parsed(*options.split())


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing.jsonl is no file"):
        read_requests(str(tmp_path / "nothing.jsonl"))


def test_who_learns_is_chosen_and_the_shipped_policies_make_the_team() -> None:
    for learns, wanted in (("both", None), ("planner", ("planner",)), ("robot", ("robot",))):
        team = make_team(parsed("--learns", learns, "--assets", "stand-ins").config)
        assert team.learning == wanted
        assert list(team.members) == ["planner", "robot"]


def test_the_shipped_policy_on_placeholder_assets_is_told_with_the_one_that_suits() -> None:
    assert find_other_images(parsed("--policy", "shipped", "--assets", "stand-ins").config) is None
    line = find_other_images(parsed("--assets", "stand-ins").config)
    assert line is not None
    assert "on LIBERO's own assets, not on stand-ins (`shipped` names the one that was)" in line


async def test_a_dry_run_opens_one_simulator_for_the_scene_that_all_requests_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[EnvSpec] = []

    async def note(envs: Sequence[EnvSpec], config: SimulatorConfig) -> None:
        opened.extend(envs)

    monkeypatch.setattr(dry_run, "open_each", note)
    words = ("--dry-run", "--assets", "stand-ins", "--run.device", "cpu")
    assert await main(parsed(*words, "--run.root", str(tmp_path))) == 0
    (env,) = opened
    starts = training_starts(parsed("--assets", "stand-ins").config)
    assert {each for start in starts for each in start.env.kwargs["goals"]} <= {
        *env.kwargs["goals"]
    }
    assert env.kwargs["assets"] == "stand-ins"


def test_requests_of_two_scenes_have_two_simulators_to_open() -> None:
    starts = training_starts(parsed("--num-requests", "3").config)
    kwargs = {**starts[2].env.kwargs, "task_id": 5}
    other = replace(starts[2], env=replace(starts[2].env, kwargs=kwargs))
    (first, second) = one_env_of_each_scene([*starts, other])
    asked = [(*each.env.kwargs["goals"], *each.env.kwargs["forbidden"]) for each in starts]
    assert first.kwargs["goals"] == list(dict.fromkeys(goal for goals in asked for goal in goals))
    assert second.kwargs["goals"] == list(dict.fromkeys(asked[2]))
    assert second.kwargs["task_id"] == 5


def read_plan(seed: int, mistakes: float) -> tuple[str, list[tuple[str, str]], str]:
    """Return the request of a demonstrated plan, its calls with their answers, and the last one's name."""
    conversation = demonstrate_plan(seed, mistakes)
    calls = [
        (json.loads(said.tool_calls[0].arguments)["instruction"], answer.content)
        for said, answer in itertools.pairwise(conversation)
        if said.tool_calls and answer.role == "tool"
    ]
    names = [call.name for said in conversation for call in said.tool_calls]
    return conversation[1].content, calls, names[-1]


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_without_mistakes_asks_for_what_is_left_until_all_is_done(seed: int) -> None:
    words, calls, last = read_plan(seed, mistakes=0.0)
    (request,) = {each for each in draw_requests("train", NUM_REQUESTS) if each.request == words}
    done = [instruction for instruction, answer in calls if not answer.startswith("ran 150 steps")]
    skills = list_skills(find_task("libero_goal", 0))
    goals = {task.instruction: read_goals(task.goal_file) for task in list_tasks("libero_goal")}
    assert all(instruction in skills for instruction, _ in calls)
    assert all(goal.split() in goals[each] for goal, each in zip(request.goals, done, strict=False))
    assert (last == "finish" and len(done) == len(request.goals)) or len(calls) == 8
    # a call that failed is repeated
    failed = [number for number, (_, answer) in enumerate(calls) if "ran 150 steps" in answer]
    assert all(calls[number][0] == calls[number + 1][0] for number in failed)


def test_mistaken_plans_end_early_or_ask_for_another_skill() -> None:
    plans = [read_plan(seed, mistakes=0.5) for seed in range(60)]
    assert any(not calls for _, calls, _ in plans)
    right = {seed: [each for each, _ in read_plan(seed, 0.0)[1]] for seed in range(60)}
    assert any({each for each, _ in plan[1]} - {*right[seed]} for seed, plan in enumerate(plans))


@pytest.mark.slow
async def test_the_shipped_planner_half_knows_what_requests_ask_for() -> None:
    requests = draw_requests("train", 20)
    outcomes = await run_requests(str(GOAL_PLANNER), requests, Sampling(greedy=True))
    # one that knows the form of calls alone fulfils 1 of 60
    assert 10 <= outcomes.count("1") < 20


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_recipe_runs_with_the_placeholder_assets(tmp_path: Path) -> None:
    file = write_requests(
        tmp_path / "own.jsonl", {"request": "light it", "goals": ["turnon flat_stove_1"]}
    )
    status = await main(parsed(*SMALL, "--requests", file, "--run.root", str(tmp_path)))
    assert status == 0
    run = tmp_path / next(name for name in os.listdir(tmp_path) if name.startswith("grpo_planner"))
    (line,) = read_metrics(run / "metrics.jsonl")
    assert line["planner/update/decisions"] >= 2
    assert line["rollout/env_steps_per_s"] > 0
