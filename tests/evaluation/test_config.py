"""An evaluation runs every episode of its suite once, under conditions that are recorded and that fit the policy."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from vla_rl.envs.libero import tasks
from vla_rl.errors import ConfigError
from vla_rl.evaluation import parse_numbers, suites
from vla_rl.evaluation.conditions import (
    differences,
    episode_conditions,
    record_conditions,
    refuse_other_conditions,
)
from vla_rl.evaluation.config import planned_episodes
from vla_rl.evaluation.suites import (
    LIBERO,
    METAWORLD,
    describe_suites,
    get_benchmark,
    require_fitting,
)
from vla_rl.recipes.driving_training import HeldOutScenesConfig
from vla_rl.recipes.eval_libero import EvalLiberoConfig
from vla_rl.recipes.grpo_text import GrpoTextConfig
from vla_rl.recipes.srpo_libero import HeldOutConfig, SrpoLiberoConfig
from vla_rl.recipes.train_toy import HeldOutSeeds, TrainToyConfig
from vla_rl.types import EnvSpec


def test_the_plan_holds_every_task_state_and_scene_once_with_seeds_of_its_own() -> None:
    config = EvalLiberoConfig(
        suites=("libero_goal", "libero_object"), tasks="1,3", init_states="40-42", scene_seeds="0,7"
    )
    episodes = planned_episodes(config)
    assert len(episodes) == len({episode.policy_seed for episode in episodes}) == 2 * 2 * 3 * 2
    assert {episode.options["init_state_id"] for episode in episodes} == {40, 41, 42}
    assert {episode.env.kwargs["scene_seed"] for episode in episodes} == {0, 7}
    assert all(episode.sampling.greedy for episode in episodes)
    # a narrower plan runs the same episodes in the same way
    narrow = planned_episodes(
        msgspec.structs.replace(
            config, suites=("libero_object",), init_states="42", temperature=1.6
        )
    )
    seeds = {
        (e.task, e.options["init_state_id"], e.env.kwargs["scene_seed"]): e.policy_seed
        for e in episodes
    }
    for episode in narrow:
        key = (episode.task, 42, episode.env.kwargs["scene_seed"])
        assert seeds[key] == episode.policy_seed
        assert (episode.sampling.greedy, episode.sampling.temperature) == (False, 1.6)


def test_a_whole_suite_has_its_500_episodes() -> None:
    assert len(planned_episodes(EvalLiberoConfig(suites=("libero_spatial",)))) == 500


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (EvalLiberoConfig(tasks="0", init_states="0"), (84, "fast")),
        (EvalLiberoConfig(checkpoint="theirs", tasks="0", init_states="0"), (256, "exact")),
        (
            EvalLiberoConfig(tasks="0", init_states="0", image_size=64, quality="exact"),
            (64, "exact"),
        ),
    ],
)
def test_images_are_those_that_a_policy_was_trained_with_unless_others_are_asked_for(
    config: EvalLiberoConfig, expected: tuple[int, str]
) -> None:
    (episode,) = planned_episodes(config)
    assert (episode.env.kwargs["image_size"], episode.env.kwargs["quality"]) == expected


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tasks": "10"}, "tasks of libero_object are '10', expected numbers from 0 to 9"),
        (
            {"init_states": "40-2147483648"},
            "init_states of libero_object/0 are '40-2147483648', expected numbers from 0 to",
        ),
        ({"suites": ("libero_goal", "libero_goal")}, "expected each once"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvalLiberoConfig(**changed)


def test_each_value_that_differs_has_its_whole_name() -> None:
    now = {"arms": {"grpo": {"lr": 2, "seed": 0}, "srpo": {"lr": 1}}, "updates": 3}
    before = {"arms": {"grpo": {"lr": 1, "seed": 0}, "srpo": {"lr": 1}}, "updates": 3, "tasks": 2}
    assert sorted(differences(now, before)) == [("arms.grpo.lr", 2, 1), ("tasks", None, 2)]


def test_the_error_has_the_one_value_and_not_the_record_around_it(tmp_path: Path) -> None:
    record = tmp_path / "conditions.json"
    record_conditions(record, {"arms": {"grpo": {"lr": 1, "temperature": 0.25}}})
    refuse_other_conditions(record, {"arms": {"grpo": {"lr": 1, "temperature": 0.25}}})
    with pytest.raises(ConfigError, match=r"^arms\.grpo\.lr is 2 now, .* says 1, and") as refused:
        refuse_other_conditions(record, {"arms": {"grpo": {"lr": 2, "temperature": 0.25}}})
    assert "0.25" not in str(refused.value)


def test_conditions_are_how_episodes_are_run_and_not_which() -> None:
    episodes = planned_episodes(
        EvalLiberoConfig(
            checkpoint="theirs",
            init_states="0-1",
            tasks="0-1",
            scene_seeds="0-1",
            scenes="same",
            temperature=0.5,
        )
    )
    assert len(episodes) == 8
    assert episode_conditions(episodes) == {
        "assets": None,
        "image_size": 256,
        "physics": "exact",
        "quality": "exact",
        "step_limit": None,
        "temperature": 0.5,
    }


PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"


async def test_its_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for number, snippet in enumerate(
        re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL), start=1
    ):
        exec(compile(snippet, f"{PAGE.name} snippet {number}", "exec"), names)
    assert "between 95.1 and 98.2 %" in capsys.readouterr().out
    env = EnvSpec(id="vla_rl/toy_reach-v0", kwargs={"action_dim": 7, "step_limit": 4})
    assert 0.0 <= await names["success_rate"](env, 3) <= 1.0


def test_every_option_of_held_out_starts_that_it_names_exists() -> None:
    named = set(re.findall(r"--held-out\.([a-z][a-z-]+)", PAGE.read_text()))
    shown = (HeldOutConfig, HeldOutSeeds, HeldOutScenesConfig)
    known = {name for config in shown for name in config.__struct_fields__}
    assert len(named) > 6
    assert {name.replace("-", "_") for name in named} <= known


def test_every_option_it_names_exists() -> None:
    named = set(re.findall(r"`?--([a-z][a-z-]+)", PAGE.read_text())) - {
        *("help", "dry-run", "resume", "resume-from"),
    }
    shown = (EvalLiberoConfig, SrpoLiberoConfig, TrainToyConfig, GrpoTextConfig)
    known = {name for config in shown for name in config.__struct_fields__}
    assert {name.replace("-", "_") for name in named} <= known


def policy(**changes: Any) -> Any:
    fields = {"cameras": ("image",), "state_size": 8, "action_dim": 7} | changes
    return SimpleNamespace(config=SimpleNamespace(**fields))


def test_a_suite_belongs_to_its_simulator_and_unknown_ones_to_libero() -> None:
    assert get_benchmark("libero_goal") is LIBERO
    assert get_benchmark("some_new_suite") is LIBERO
    assert all(get_benchmark(suite) is METAWORLD for suite in METAWORLD.suites)


def test_a_suite_of_the_other_simulator_is_shown_its_recipes() -> None:
    suite = METAWORLD.suites[0]
    assert describe_suites(LIBERO, suite).endswith("; the recipes for Meta-World end in _metaworld")
    assert "recipes" not in describe_suites(LIBERO, "some_new_suite")
    assert "libero_goal" in describe_suites(LIBERO, "some_new_suite")


def test_a_policy_that_fits_passes() -> None:
    require_fitting(policy(), "mine", LIBERO)
    require_fitting(policy(state_size=None, cameras=("image", "wrist_image")), "mine", LIBERO)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cameras": ("image", "left")}, "mine needs the camera 'left', which LIBERO does not"),
        (
            {"state_size": 4},
            "mine reads a state of 4 numbers, and LIBERO's has 8",
        ),
        ({"action_dim": 14}, "mine gives actions of 14 numbers, and LIBERO's arm takes 7$"),
        ({"action_dim": 32, "padded_dim": 32}, "32 is the padded width, .* never masked"),
        ({"fixed_image_size": 84}, "sees images of 84 pixels .* set --image-size 84"),
    ],
)
def test_a_policy_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_fitting(policy(**changes), "mine", LIBERO, image_size=256)


def test_one_line_says_that_a_gripper_was_not_checked(caplog: pytest.LogCaptureFixture) -> None:
    require_fitting(policy(fixed_image_size=256), "mine", LIBERO, image_size=256)
    assert not caplog.messages
    require_fitting(policy(padded_dim=32), "mine", LIBERO, image_size=256)
    (line,) = caplog.messages
    assert line.startswith("mine: the gripper's range and sign were not checked")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("all", (0, 1, 2, 3, 4)), ("0-2", (0, 1, 2)), ("4,0-1,1", (4, 0, 1)), ("3", (3,))],
)
def test_numbers_are_lists_of_ranges(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_numbers(text, 5, "tasks") == numbers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-5", "tasks are '0-5', expected numbers from 0 to 4"),
        ("3-1", "expected ascending ranges, not '3-1'"),
        ("", "expected 'all', or numbers and ranges"),
        ("1;2", "expected 'all', or numbers and ranges"),
    ],
)
def test_other_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_numbers(text, 5, "tasks")


def without_libero(package: str) -> Any:
    raise ImportError("LIBERO is not installed; run `pip install it`.")


def test_without_libero_an_evaluation_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "find_package_root", without_libero)
    with pytest.raises(ConfigError, match="suites: LIBERO is not installed; run `pip install it`"):
        EvalLiberoConfig()
    with pytest.raises(ConfigError, match="tasks: LIBERO is not installed"):
        suites.parse_tasks(("libero_goal",), "tasks")
