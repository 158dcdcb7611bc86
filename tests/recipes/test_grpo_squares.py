"""Training on questions about images, as the command is typed, from a tiny Qwen2.5-VL."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_vision import tiny_vision, write_tiny_vision

from benchmarks.gpu.tracked_memory import compare_talks
from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.envs.text.tasks.questions import COLOURS, draw_square
from vla_rl.errors import ConfigError
from vla_rl.learner import LearnerConfig
from vla_rl.models.example_talks import Talks, image_tokens
from vla_rl.models.language import VisionLanguageModel, load_language_model
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.grpo_squares import (
    GrpoSquaresConfig,
    footprint_of,
    main,
    policy_of,
    starts_of,
)
from vla_rl.recipes.grpo_text import ARITHMETIC_BASE
from vla_rl.reporting import read_metrics
from vla_rl.run.estimates import estimate_run, require_gpu_memory
from vla_rl.team.members import Team

COMMAND = (
    "--run.updates 2 --run.device cpu --group-size 4 --scheduler.groups-per-update 2 --size 56 "
    "--scheduler.max-staleness 0 --text.num-envs 8 --learner.optimizer.lr 1e-2 --num-validation 2 --num-tries 1"
)


async def test_one_command_trains_a_policy_on_what_it_sees(tmp_path: Path) -> None:
    write_tiny_vision(tmp_path / "policy")
    words = f"{COMMAND} --run.root {tmp_path} --policy {tmp_path / 'policy'}".split()
    assert await main(parse_command(TrainingLaunch, GrpoSquaresConfig, "", words)) == 0
    (run,) = tmp_path.glob("grpo_squares-*")  # noqa: ASYNC240
    lines = list(read_metrics(run / "metrics.jsonl"))
    assert [int(line["update"]) for line in lines] == [1, 2]
    assert all(0.0 <= line["reward/mean"] <= 1.0 for line in lines)
    assert sum(line["update/taught"] for line in lines) > 0
    gaps = [line["update/log_prob_gap_max"] for line in lines if line["update/taught"]]
    assert max(gaps) < 1e-4
    saved = load_language_model(run / "checkpoints" / "update-000002" / "policy")
    assert isinstance(saved, VisionLanguageModel)
    assert len((run / "validation.jsonl").read_bytes().splitlines()) == 2


def test_images_of_validation_are_never_trained_on_and_the_seed_draws_them() -> None:
    config = GrpoSquaresConfig(num_starts=50, num_validation=10)
    trained, held_out = starts_of(config)
    seeds = [start.seed for start in (*trained, *held_out)]
    assert (len(trained), len(held_out), len(set(seeds))) == (50, 10, 60)
    assert starts_of(config) == (trained, held_out)
    image, colour, side = draw_square(seeds[0], 40)
    assert (image.dtype, image.shape) == (np.uint8, (40, 40, 3))
    places = np.argwhere((image == COLOURS[colour]).all(axis=2))
    assert len(places) == 100
    assert side == ("left" if places[:, 1].max() < 20 else "right")


SIZE = 112
"""Pixels of an image, height and width: a whole window of the tower's attention. Each further window is
traced operation by operation."""

DEPTH = 2
"""Blocks of the tower, one of each kind: attention within a window, and over the whole image."""


def test_the_plan_counts_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = GrpoSquaresConfig(
        run=RunConfig(name="x", root=str(tmp_path)), size=SIZE, learner=LearnerConfig(micro_batch=2)
    )
    model = tiny_vision(num_layers=1, depth=DEPTH)
    footprint, team = footprint_of(config, model), Team.of(model)
    with_images = estimate_run(config, team, footprint.heard_tokens, footprint.heard_images)
    without = estimate_run(config, team, footprint.heard_tokens)
    assert with_images is not None
    assert without is not None
    assert with_images.talks is not None
    assert with_images.talks.images == ((SIZE, SIZE),)
    shown = with_images.talks.rows * (SIZE // 14) ** 2
    added = with_images.memory.terms["activations"] - without.memory.terms["activations"]
    # the tower's blocks keep at least their products, each 32 or 48 numbers for a patch
    assert added > DEPTH * shown * 4 * (3 * 32 + 3 * 48)
    # what is refused without room for it: the images alone, held against torch's tracker
    (tokens,) = image_tokens(model, ((SIZE, SIZE),))
    shortest = Talks(tokens + 1, 1, 1, rows=2, images=((SIZE, SIZE),))
    tracked = compare_talks(model, shortest)
    assert abs(tracked.error) <= 0.05
    kept = tracked.estimate.terms["activations"]
    assert with_images.certain.terms["activations"] == kept > 0
    assert without.certain.terms["activations"] == 0
    shows = team.showing(footprint.heard_images)
    available = without.certain.total + kept // 2
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (available, available))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    require_gpu_memory(config, team, torch.device("cuda"))
    with pytest.raises(ConfigError, match="needs more memory than the GPU has free"):
        require_gpu_memory(config, shows, torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"images of a conversation have \d+ tokens"):
        estimate_run(config, team, footprint.heard_tokens, ((448, 448),) * 8)


def test_a_policy_that_reads_text_alone_is_refused_and_a_frozen_tower_stays() -> None:
    config = GrpoSquaresConfig(policy=str(ARITHMETIC_BASE), freeze_vision=True)
    with pytest.raises(ConfigError, match="CausalLanguageModel that reads text alone"):
        policy_of(config)
