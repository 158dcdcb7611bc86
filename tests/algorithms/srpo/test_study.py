"""SRPO's page and study: examples that run as written, measures by hand, what the recorded episodes say."""

import itertools
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from small_batches import with_frames

from benchmarks.srpo_reward.episodes import Episode, as_groups, load_episodes, save_episodes
from benchmarks.srpo_reward.study import batch_of, figures_of, interleaved, score, scores_of
from vla_rl.algorithms import EmbeddingConfig, ObservationEncoder
from vla_rl.algorithms.srpo.encoders import Encoder, ShortVideos
from vla_rl.algorithms.srpo.rules import Clustering, Rule

PAGE = Path(__file__).parents[3] / "docs" / "srpo.md"
BLOCKS = [block.split("```")[0] for block in PAGE.read_text().split("```python\n")[1:]]


def test_the_rewards_of_the_page_run_as_written() -> None:
    names: dict[str, Any] = {
        "trajectories": [with_frames(6, seed=seed, episode_id=seed) for seed in (0, 1, 0)],
        "is_success": np.array([True, False, False]),
        "tasks": ["a", "a", "a"],
        "update": 0,
    }
    exec(compile(BLOCKS[0], str(PAGE), "exec"), names)
    # the third saw what the first saw, so it retraced everything: alpha
    rewards = names["rewards"].tolist()
    assert rewards[0] == 1.0
    assert rewards[2] == np.float32(0.8)
    assert 0.0 < rewards[1] < 0.8
    assert names["bank"].metrics(1) == {
        "reward/bank_size": 1.0,
        "reward/bank_age_mean": 1.0,
        "reward/bank_age_max": 1.0,
    }


def test_the_configurations_of_the_page_are_accepted() -> None:
    names: dict[str, Any] = {}
    exec(compile(BLOCKS[1], str(PAGE), "exec"), names)
    assert names["as_the_paper"].vjepa2.num_moments == 1
    assert names["in_the_order_of_time"].vjepa2.num_moments == 16


def test_the_page_names_everything_that_can_be_chosen() -> None:
    text = PAGE.read_text()
    choices = [get_args(each) for each in (Rule, Clustering, Encoder, ShortVideos)]
    for name in (*itertools.chain(*choices), "float16"):
        assert f"`{name}`" in text or f'"{name}"' in text, name


def episode(
    start: int, furthest: float, is_success: bool = False, task: str = "t", kind: str = "lost"
) -> Episode:
    frames = np.random.default_rng(int(100 * furthest) + start).integers(
        0, 256, (4, 16, 16, 3), dtype=np.uint8
    )
    return Episode(
        task=task,
        init_state_id=start,
        kind=kind,
        is_success=is_success,
        frames=frames,
        states=np.full((4, 8), furthest, np.float32),
        progress=np.array([0.0, furthest, furthest / 2, 0.1], np.float32),
    )


def a_batch():
    won = {"furthest": 1.0, "is_success": True}
    return batch_of(
        [
            *(episode(0, **won), episode(0, 0.2), episode(0, 0.5), episode(0, 0.8)),
            *(episode(1, **won), episode(1, 0.3), episode(1, 0.6)),
        ]
    )


def test_rewards_that_rank_failures_by_progress_score_one() -> None:
    found = score(a_batch(), np.array([1.0, 0.2, 0.5, 0.8, 1.0, 0.3, 0.6]))
    assert (found.spearman, found.spearman_in_group, found.distinct_failures) == pytest.approx(
        (1.0, 1.0, 1.0)
    )


def test_the_measures_by_hand() -> None:
    # progress of the failures .2 .5 .8 .3 .6 has ranks 1 3 5 2 4; rewards .1 .2 .3 .4 .4 have ranks
    # 1 2 3 4.5 4.5
    found = score(a_batch(), np.array([1.0, 0.1, 0.2, 0.3, 1.0, 0.4, 0.4]))
    truth, ranks = np.array([1, 3, 5, 2, 4]) - 3.0, np.array([1, 2, 3, 4.5, 4.5]) - 3.0
    assert found.spearman == pytest.approx(truth @ ranks / np.sqrt(truth @ truth * (ranks @ ranks)))
    assert found.spearman_in_group == pytest.approx(1.0)  # only the first group has three failures
    assert found.distinct_failures == 0.5  # the second group's failures are told the same


def test_rewards_that_are_all_equal_score_nothing() -> None:
    found = score(a_batch(), np.array([1.0, 0.3, 0.3, 0.3, 1.0, 0.3, 0.3]))
    assert (found.spearman, found.spearman_in_group, found.distinct_failures) == (0.0, 0.0, 0.0)


def test_a_group_is_a_task_a_start_and_a_kind_of_runner() -> None:
    made = [
        episode(0, 0.2),
        episode(0, 0.3, kind="policy"),
        episode(1, 0.4),
        episode(0, 0.5),
        episode(0, 0.6, task="u"),
    ]
    groups = as_groups(made)
    found = [[round(member.furthest, 3) for member in members] for _, members in groups]
    assert found == [[0.2, 0.5], [0.3], [0.4], [0.6]]
    ids = [
        trajectory.episode.episode_id for group, _ in groups for trajectory in group.trajectories
    ]
    assert ids == [0, 1, 2, 3, 4]


def test_the_released_code_mixes_the_videos_of_a_prompt_moment_by_moment() -> None:
    (group, members), *_ = as_groups([episode(0, 0.2), episode(0, 0.5)])
    mixed = interleaved(group.trajectories)
    seen = [*(step.observation["image"] for step in mixed.steps), mixed.final_observation["image"]]
    expected = [member.frames[moment] for moment in range(4) for member in members]
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(seen, expected, strict=True))


async def test_a_video_for_a_whole_prompt_tells_no_failures_apart() -> None:
    scores = await scores_of(a_batch(), ObservationEncoder(EmbeddingConfig()))
    assert scores["released"].distinct_failures == 0.0
    assert scores["released_own_videos"].distinct_failures == 1.0


def test_episodes_come_back_from_disk_nearly_as_they_were(tmp_path: Path) -> None:
    smooth = np.linspace(0, 255, 32, dtype=np.uint8)[:, None, None] * np.ones((1, 32, 3), np.uint8)
    made = [
        msgspec.structs.replace(each, frames=np.stack([smooth // 2 + shade] * 4))
        for each, shade in (
            (episode(0, 0.5), 0),
            (episode(1, 1.0, is_success=True, kind="policy"), 60),
        )
    ]
    assert save_episodes(made, tmp_path) == sum(file.stat().st_size for file in tmp_path.iterdir())
    found = load_episodes(tmp_path)
    for ours, theirs in zip(found, made, strict=True):
        assert (ours.task, ours.init_state_id, ours.kind) == (
            theirs.task,
            theirs.init_state_id,
            theirs.kind,
        )
        assert (ours.is_success, ours.furthest) == (theirs.is_success, theirs.furthest)
        assert ours.states.tolist() == theirs.states.tolist()
        assert np.abs(ours.frames.astype(int) - theirs.frames).mean() < 4.0


def test_missing_episodes_say_how_to_record_them(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="srpo_reward --record"):
        load_episodes(tmp_path)


async def test_on_the_recorded_episodes_ours_ranks_failures_better_than_the_rules_it_stands_beside() -> (
    None
):
    batch = batch_of(load_episodes())
    scores = {
        name: await scores_of(batch, ObservationEncoder(EmbeddingConfig(encoder=name)))
        for name in ("pixels", "state")
    }
    figures = figures_of(scores)
    assert figures["spearman_ours"] > 0.5
    assert figures["spearman_ours"] > figures["spearman_paper"] + 0.2
    assert figures["spearman_ours"] > figures["spearman_released"] + 0.2
    assert figures["distinct_failures_ours"] == 1.0
    assert figures["distinct_failures_released"] == 0.0
    assert figures["state/ours/spearman"] > figures["state/paper/spearman"]
