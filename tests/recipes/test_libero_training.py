"""Scenes, limits and learning rate of the training recipes for LIBERO."""

from pathlib import Path

import msgspec
import pytest

from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.libero_training import with_decay_over_run
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig
from vla_rl.recipes.suite_training import held_out_episodes, starts_of


def test_pictures_are_as_the_policy_was_taught_them_unless_said_otherwise(tmp_path: Path) -> None:
    for config, quality, size in [
        (SrpoLiberoConfig(), "fast", 84),
        (SrpoLiberoConfig(policy=str(tmp_path)), "exact", 256),
        (SrpoLiberoConfig(quality="exact", image_size=96), "exact", 96),
        (SrpoLiberoConfig(policy=str(tmp_path), quality="fast"), "fast", 256),
    ]:
        assert {start.env.kwargs["quality"] for start in starts_of(config)} == {quality}
        assert {start.env.kwargs["image_size"] for start in starts_of(config)} == {size}
        assert {episode.env.kwargs["image_size"] for episode in held_out_episodes(config)} == {size}
        assert {episode.env.kwargs["quality"] for episode in held_out_episodes(config)} == {quality}


def test_training_episodes_are_cut_short_for_the_policy_that_ships_and_judged_ones_never(
    tmp_path: Path,
) -> None:
    for config, limit in [
        (SrpoLiberoConfig(), 160),
        (SrpoLiberoConfig(step_limit=300), 300),
        (SrpoLiberoConfig(policy=str(tmp_path)), None),
        (SrpoLiberoConfig(policy=str(tmp_path), step_limit=50), 50),
    ]:
        assert {start.env.kwargs["step_limit"] for start in starts_of(config)} == {limit}
        assert {episode.env.kwargs["step_limit"] for episode in held_out_episodes(config)} == {None}


def test_the_learning_rate_decays_over_the_whole_run_of_the_shipped_policy() -> None:
    config = SrpoLiberoConfig()
    assert config.decays_over_run
    # 26 updates of 32 episodes in steps of 8
    assert with_decay_over_run(config).learner.optimizer.decay_steps == 26 * 4
    twice = msgspec.structs.replace(config.learner, epochs=2, minibatch_trajectories=10)
    longer = msgspec.structs.replace(config, learner=twice)
    assert with_decay_over_run(longer).learner.optimizer.decay_steps == 26 * 2 * 4


@pytest.mark.parametrize(
    "config",
    [
        SrpoLiberoConfig(policy="somewhere/else"),
        SrpoLiberoConfig(run=RunConfig(name="short", updates=3)),
        SrpoLiberoConfig(learner=LearnerConfig(optimizer=OptimizerConfig(decay_steps=50))),
    ],
    ids=["another policy", "no longer than the warm-up", "set"],
)
def test_it_is_as_configured_otherwise(config: SrpoLiberoConfig) -> None:
    assert not config.decays_over_run
