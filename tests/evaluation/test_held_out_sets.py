"""The starts that choose a checkpoint and those that report it have none in common."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from uneven_world import starts

from vla_rl.errors import ConfigError
from vla_rl.evaluation import HeldOutJudge
from vla_rl.evaluation.held_out_book import RowFormat
from vla_rl.evaluation.held_out_results import SUCCESSES
from vla_rl.evaluation.held_out_schedule import HeldOutSchedule
from vla_rl.evaluation.held_out_sets import choosing_numbers, number_ranges, split_in_two
from vla_rl.evaluation.scored import SCORES
from vla_rl.recipes import driving_training, srpo_driving_loop, srpo_toy, suite_training, train_toy
from vla_rl.recipes.driving_training import HeldOutScenesConfig, score_judge
from vla_rl.recipes.grpo_driving import GrpoDrivingConfig
from vla_rl.recipes.grpo_libero import GrpoLiberoConfig
from vla_rl.recipes.ppo_libero import PpoLiberoConfig
from vla_rl.recipes.srpo_driving import SrpoDrivingConfig
from vla_rl.recipes.srpo_driving_loop import SrpoDrivingLoopConfig
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig
from vla_rl.recipes.srpo_metaworld import SrpoMetaworldConfig
from vla_rl.recipes.srpo_toy import HeldOutReaches, SrpoToyConfig
from vla_rl.recipes.train_toy import HeldOutSeeds, TrainToyConfig
from vla_rl.types import EpisodeSpec

Sets = tuple[Sequence[EpisodeSpec], Sequence[EpisodeSpec]]


def beside(config: Any, **changed: Any) -> Any:
    """The configuration with evaluations beside training."""
    held_out = msgspec.structs.replace(config.held_out, every=5, **changed)
    return msgspec.structs.replace(config, held_out=held_out)


def of_scenes(module: Any, config: Any) -> Sets:
    judge = score_judge(module.held_out_episodes(config), config.held_out, None, "p")
    return judge.episodes, judge.choose


def sets_of(config: Any) -> tuple[Sets, RowFormat]:
    if isinstance(config, TrainToyConfig):
        pair = train_toy.held_out_episodes(config), train_toy.choosing_episodes(config)
        return pair, SUCCESSES
    if isinstance(config, SrpoToyConfig):
        pair = srpo_toy.held_out_episodes(config), srpo_toy.choosing_episodes(config)
        return pair, SUCCESSES
    if isinstance(config, SrpoDrivingLoopConfig):
        return of_scenes(srpo_driving_loop, config), SCORES
    if isinstance(config, driving_training.SceneTrainingConfig):
        return of_scenes(driving_training, config), SCORES
    pair = suite_training.held_out_episodes(config), suite_training.choosing_episodes(config)
    return pair, SUCCESSES


@pytest.mark.parametrize(
    ("config", "num_reported", "num_choosing"),
    [
        (SrpoLiberoConfig(), None, None),
        (GrpoLiberoConfig(), None, None),
        (PpoLiberoConfig(), None, None),
        (SrpoMetaworldConfig(), None, None),
        (SrpoToyConfig(held_out=HeldOutReaches(init_states="20-29")), 10, 10),
        (SrpoToyConfig(held_out=HeldOutReaches(init_states="12-16,19-29,31-49")), 35, 11),
        (TrainToyConfig(success_return=1.0, held_out=HeldOutSeeds(starts=64)), 64, 64),
        (
            TrainToyConfig(success_return=1.0, held_out=HeldOutSeeds(starts=64, choose_starts=9)),
            64,
            9,
        ),
        (GrpoDrivingConfig(), 500, 500),
        (SrpoDrivingConfig(held_out=HeldOutScenesConfig(scenes=20, choose_scenes=7)), 20, 7),
        (SrpoDrivingLoopConfig(), 500, 500),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_recipe_has_two_sets_that_follow_what_is_reported(
    config: Any, num_reported: int | None, num_choosing: int | None
) -> None:
    (report, choose), format = sets_of(beside(config))
    keys = [{format.key_of(each) for each in found} for found in (report, choose)]
    assert not keys[0] & keys[1]
    assert (len(keys[0]), len(keys[1])) == (len(report), len(choose))
    if num_reported is None:  # by default as many choose as are reported
        num_reported = num_choosing = len(sets_of(config)[0][0])
    assert (len(report), len(choose)) == (num_reported, num_choosing)


def test_without_evaluations_beside_training_all_starts_are_reported_and_none_chooses() -> None:
    config = SrpoLiberoConfig()
    assert len(suite_training.held_out_episodes(config)) == 60
    assert suite_training.choosing_episodes(config) == []
    judge = HeldOutJudge(starts(4), choose=starts(8)[4:])
    assert (len(judge.episodes), judge.choose) == (4, ())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"choose_init_states": "45-60"},
            "'45-60', but 45, 46, 47, 48, 49 are in held_out.init_st",
        ),
        ({"choose_init_states": "39,60"}, "'39,60', but 39 are trained on too"),
        ({"init_states": "39-49"}, "the first 40 are trained on"),
    ],
)
def test_starts_of_both_sets_or_of_training_are_refused(
    changed: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        beside(SrpoLiberoConfig(), **changed)


def test_a_task_whose_starts_are_all_reported_has_none_to_choose_by() -> None:
    everything = ",".join(str(each) for each in range(50) if each not in (11, 17, 18, 30))
    config = SrpoToyConfig(held_out=HeldOutReaches(init_states=everything))
    with pytest.raises(ConfigError, match=r"none is left to choose the best checkpoint by"):
        beside(config)


def test_the_next_free_numbers_choose() -> None:
    assert choosing_numbers(None, (40, 41, 1000), range(40), 50, limit=2000) == (1001, 1002, 1003)
    assert choosing_numbers(None, (7, 9), (8,), 10) == (0, 1)
    assert number_ranges((3, 1, 2, 9)) == "1-3,9"


def test_an_own_list_of_episodes_is_split_task_by_task() -> None:
    report, choose = split_in_two(starts(7))
    assert [each.episode_id for each in report] == [0, 1, 4, 5]
    assert [each.episode_id for each in choose] == [2, 3, 6]
    judge = HeldOutJudge(starts(7), schedule=HeldOutSchedule(every=2))
    assert (judge.episodes, judge.choose) == (report, choose)


def test_an_episode_in_both_sets_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 held-out starts would choose the best checkpoint and"):
        HeldOutJudge(starts(4), choose=starts(2), schedule=HeldOutSchedule(every=2))


def test_scenes_that_a_folder_lacks_leave_a_set_for_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def sizes(num_found: int, **wanted: int) -> tuple[int, int]:
        held_out = HeldOutScenesConfig(every=5, **wanted)
        judge = score_judge(starts(num_found), held_out, None, "p")
        return len(judge.episodes), len(judge.choose)

    assert sizes(100, scenes=50) == (50, 50)
    assert capsys.readouterr().out == ""
    assert sizes(80, scenes=50) == (50, 30)
    assert sizes(40, scenes=50) == (20, 20)  # half of all that there are
    assert (
        "40 held-out scenes were found: 20 are reported, and 20 choose" in capsys.readouterr().out
    )
    with pytest.raises(ConfigError, match="none is left to choose the best checkpoint by"):
        sizes(40, scenes=40, choose_scenes=10)
