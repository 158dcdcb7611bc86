"""Benchmarks measure what they say, on small models with small loads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import language, planner_words, serving
from benchmarks.flow_runs import join_outcomes, print_flow_runs, read_curves
from benchmarks.planner_learning import compare_runs
from benchmarks.planner_skills import summarise_skills
from benchmarks.planner_words import WordScene
from vla_rl.envs.libero.requests import Request
from vla_rl.models.language import TinyConfig
from vla_rl.models.language.tiny import write_tiny
from vla_rl.types import EnvSpec, EpisodeSpec

SMALL = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=512,
)

SIZES = ("--prompts", "6", "--rows", "2", "--shortest", "2", "--longest", "8", "--no-vllm")


def test_its_last_line_has_every_figure_that_its_help_explains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(tmp_path, SMALL, ["Explain the tides."] * 4, seed=0)
    language.main(["--policy", str(tmp_path), *SIZES])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert language.__doc__ is not None
    assert all(f"    {name} " in language.__doc__ for name in figures)
    assert figures.pop("vllm_vs_torch_tokens_per_s") is None
    assert 0.8 <= figures.pop("group_prefill_share") <= 7 / 8
    assert figures.pop("logprob_gap") <= 1e-4
    assert len(figures) == 3
    assert all(value > 0.0 for value in figures.values())


def test_without_the_model_it_says_which_command_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        language.main([*SIZES])
    assert caught.value.code == 1
    assert "run `vla-rl install smollm2`" in capsys.readouterr().err


def test_the_last_line_of_serving_has_every_figure_that_its_help_explains(
    capsys: pytest.CaptureFixture[str],
) -> None:
    serving.main(["--quick"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert serving.__doc__ is not None
    assert all(f"    {name} " in serving.__doc__ for name in figures)
    assert figures["replies_lost"] == 0
    assert figures["reloads_mixed"] == 0
    assert figures["idle_connections"] == 200


def test_a_skill_counts_from_sixty_percent_of_the_starts_that_exist() -> None:
    line = {"run": "libero_goal/7", "alone": "11100", "after": {"0": "1-1", "2": "100"}}
    found = summarise_skills([line, {**line, "run": "libero_goal/8", "alone": "10100"}])
    assert found["alone"] == {"libero_goal/7": 60.0, "libero_goal/8": 40.0}
    assert found["after_another"]["libero_goal/7"] == 60.0
    assert (found["skills"], found["skills_above_60"]) == (2, 1)
    assert found["skills_above_60_after_another"] == 2


def test_a_request_combines_no_two_skills_that_move_the_same_thing() -> None:
    # the bowl: 1 puts it on the stove, 8 on the plate; 2 moves the bottle, 7 turns the knob
    after = {"1": "000", "2": "111", "7": "110"}
    found = summarise_skills([{"run": "libero_goal/8", "alone": "1", "after": after}])
    assert found["after_one_of_a_request"]["libero_goal/8"] == pytest.approx(500 / 6, abs=0.1)
    assert found["after_another"]["libero_goal/8"] == pytest.approx(500 / 9, abs=0.1)


def test_runs_are_compared_request_by_request_where_a_seed_has_both() -> None:
    after = {"both/0": "1110", "planner/0": "1000", "both/1": "1111", "robot/2": "0000"}
    lines = [
        {
            "run": run,
            "outcomes_after": {"wordings/2 skills": each[2:], "combinations/2 skills": each[:2]},
        }
        for run, each in ((run, 4 * each) for run, each in after.items())
    ]
    assert join_outcomes(lines[0], "after") == 4 * "1110"
    found = compare_runs(lines, "both", "planner")
    assert found is not None
    points, low, high = found
    assert points == 50.0
    assert low is not None
    assert high is not None
    assert low < points < high
    assert compare_runs(lines, "both", "robot") is None


def test_of_too_few_differences_there_is_no_interval() -> None:
    ended = {"both/0": "1" + "0" * 39, "planner/0": "0" * 40}
    lines = [{"run": run, "outcomes_after": {"wordings": each}} for run, each in ended.items()]
    assert compare_runs(lines, "both", "planner") == (2.5, None, None)


OPEN, BURN, PLATE, AWAY = (
    "open the middle drawer of the cabinet",
    "turn on the stove",
    "put the bowl on the plate",
    "put the bowl on the stove",
)
OPENED, BURNS = "open wooden_cabinet_1_middle_region", "turnon flat_stove_1"
ON_PLATE = "on akita_black_bowl_1 plate_1"


@pytest.mark.parametrize(
    ("request_fields", "calls", "fulfilled"),
    [
        ({"goals": (OPENED, BURNS)}, [BURN, OPEN], True),
        ({"goals": (OPENED, BURNS)}, [BURN], False),
        ({"goals": (OPENED, BURNS), "in_order": True}, [BURN, OPEN], False),
        ({"goals": (OPENED, BURNS), "in_order": True}, [OPEN, BURN], True),
        ({"goals": (OPENED,), "forbidden": (BURNS,)}, [OPEN, BURN], False),
        # a bowl that is put elsewhere is no longer on the plate
        ({"goals": (ON_PLATE,)}, [PLATE, AWAY], False),
        ({"goals": (ON_PLATE, BURNS), "in_order": True}, [PLATE, BURN, AWAY, PLATE], False),
    ],
)
async def test_in_words_a_request_is_fulfilled_as_in_the_simulator(
    request_fields: dict[str, Any], calls: list[str], fulfilled: bool
) -> None:
    episode = EpisodeSpec(
        episode_id=0,
        group_id=0,
        member=0,
        env=EnvSpec(id="words"),
        task="words",
        seed=0,
        policy_seed=0,
    )
    scene = WordScene(episode, Request(request="", task="words", **request_fields))
    _, info = await scene.reset()
    assert not info["is_success"]
    for instruction in calls:
        chunk = await scene.act({"instruction": instruction})
        info = (await scene.step_chunk(np.asarray(chunk.actions))).info
    assert info["is_success"] is fulfilled


def test_planners_are_compared_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner_words, "MAX_REPLY", 16)
    write_tiny(tmp_path, TinyConfig(context_size=2048, vocab_size=300), ["Light it."] * 4, seed=0)
    assert planner_words.main([str(tmp_path), "--num", "2"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["planner"] == [str(tmp_path)]
    assert set(figures) == {"planner"} | {
        f"{split}{ending}" for split in planner_words.SPLITS for ending in ("", "_likeliest")
    }


def test_curves_of_a_team_are_those_of_its_members_and_what_is_absent_is_none() -> None:
    alone = [{"rollout/success_rate": 0.5, "update/clip_fraction": 0.1}]
    robot = {"robot/update/clip_fraction": 0.3}
    team = [{"planner/update/clip_fraction": 0.2, **robot}, robot]
    assert read_curves(alone) == {"success": [0.5], "clip_fraction": [0.1]}
    assert read_curves(team) == {
        "planner/clip_fraction": [0.2, None], "robot/clip_fraction": [0.3, 0.3],
    }  # fmt: skip


def test_runs_that_were_stopped_before_their_end_are_counted_and_not_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcomes = {"outcomes_before": {"a": "10"}, "outcomes_after": {"a": "11"}}
    ended = {"run": "ppo/0", "env_steps": 5, "cpu_seconds": 2, **outcomes}
    print_flow_runs([{"run": "tried", "stopped_after": 6, "env_steps": None}, ended])
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "1 runs that were stopped before their end are not shown."
    assert json.loads(last)["runs"] == ["ppo/0"]
