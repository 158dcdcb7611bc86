"""Recipes of vision-language policies, on tiny models in the public layout of each family."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import msgspec
import numpy as np
import pytest
import torch
from tiny_vision import FAMILIES, tiny_vision, write_tiny_vision

from benchmarks.gpu.tracked_memory import compare_conversations
from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.engines import EngineConfig
from vla_rl.errors import ConfigError, DataError
from vla_rl.learner import LearnerConfig
from vla_rl.models.example_inputs import ConversationSizes, count_image_tokens
from vla_rl.models.language import TinyConfig, VisionLanguageModel, load_language_model, tiny
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.grpo_prompts import GrpoPromptsConfig, check_prompts, main
from vla_rl.recipes.grpo_squares import (
    GrpoSquaresConfig,
    episode_footprint,
    load_vision_policy,
    main as squares_main,
    split_starts as squares_starts,
)
from vla_rl.recipes.grpo_text import ARITHMETIC_BASE
from vla_rl.reporting import read_metrics
from vla_rl.run.estimates import estimate_run, require_gpu_memory
from vla_rl.team.members import Team

PAGE = (Path(__file__).parents[2] / "docs" / "language.md").read_text()

SHAPE = TinyConfig(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64, vocab_size=300)


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config_of(prompts: str, **fields: Any) -> GrpoPromptsConfig:
    return GrpoPromptsConfig(prompts=prompts, num_validation=0, **fields)


SHOWN = [
    {"prompt": "<image>Left or right?", "answer": side, "images": [f"{side}.png"]}
    for side in ("left", "right") * 2
]
"""Questions with an image each, marked as data sets mark them."""


def write_shown(folder: Path) -> str:
    for side in ("left", "right"):
        image = np.zeros((56, 84, 3), np.uint8)
        image[:, : 42 if side == "left" else 84 : 1] = 255
        assert cv2.imwrite(str(folder / f"{side}.png"), image)
    return write(folder / "shown.jsonl", SHOWN)


async def test_questions_with_image_files_are_trained_on(tmp_path: Path) -> None:
    prompts = write_shown(tmp_path)
    write_tiny_vision(tmp_path / "policy", family="qwen3_vl")
    words = (
        "--run.updates 1 --run.device cpu --group-size 4 --scheduler.groups-per-update 2 --text.num-envs 8 "
        "--scheduler.max-staleness 0 --engine.max-reply 4 --num-validation 0 --scorer exact "
        f"--run.root {tmp_path} --policy {tmp_path / 'policy'} --prompts {prompts} --image-field images"
    ).split()
    assert await main(parse_command(TrainingLaunch, GrpoPromptsConfig, "", words)) == 0
    (run,) = tmp_path.glob("grpo_prompts-*")  # noqa: ASYNC240
    (line,) = read_metrics(run / "metrics.jsonl")
    assert (line["update"], line["reward/mean"]) == (1, pytest.approx(0.5, abs=0.5))
    assert (run / "checkpoints" / "update-000001" / "policy" / "preprocessor_config.json").is_file()


def test_images_that_cannot_be_shown_are_named_before_anything_starts(tmp_path: Path) -> None:
    config = config_of(write_shown(tmp_path), image_field="images", scorer="exact")
    reader, blind = tiny_vision(), tiny(SHAPE, ["1?"], seed=0)
    found = check_prompts(config, reader)
    assert found.image_sizes == ((56, 84),)
    assert found.num_tokens > count_image_tokens(reader, found.image_sizes)[0]
    with pytest.raises(
        ConfigError, match=r"image_field is 'images', but .* reads text alone; take"
    ):
        check_prompts(config, blind)
    few = msgspec.structs.replace(config, engine=EngineConfig(max_images=1))
    two = [{**SHOWN[0], "prompt": "which?", "images": ["left.png", "right.png"]}]
    few = msgspec.structs.replace(few, prompts=write(tmp_path / "two.jsonl", two))
    with pytest.raises(
        DataError, match=r"row 0 of .* shows 2 images, .*engine\.max_images = 1; raise"
    ):
        check_prompts(few, reader)
    file = tmp_path / "right.png"
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(DataError, match=r"image 0 of 'images' of row 1 .*right\.png, is cut short"):
        check_prompts(config, reader)


COMMAND = (
    "--run.updates 2 --run.device cpu --group-size 4 --scheduler.groups-per-update 2 --size 56 "
    "--scheduler.max-staleness 0 --text.num-envs 8 --learner.optimizer.lr 1e-2 --num-validation 2 --num-tries 1"
)


@pytest.mark.parametrize("family", FAMILIES)
async def test_one_command_trains_a_policy_on_what_it_sees(family: str, tmp_path: Path) -> None:
    write_tiny_vision(tmp_path / "policy", family=family)
    words = f"{COMMAND} --run.root {tmp_path} --policy {tmp_path / 'policy'}".split()
    assert await squares_main(parse_command(TrainingLaunch, GrpoSquaresConfig, "", words)) == 0
    (run,) = tmp_path.glob("grpo_squares-*")  # noqa: ASYNC240
    lines = list(read_metrics(run / "metrics.jsonl"))
    assert [int(line["update"]) for line in lines] == [1, 2]
    assert all(0.0 <= line["reward/mean"] <= 1.0 for line in lines)
    assert sum(line["update/trained"] for line in lines) > 0
    gaps = [line["update/log_prob_gap_max"] for line in lines if line["update/trained"]]
    assert max(gaps) < 1e-4
    saved = load_language_model(run / "checkpoints" / "update-000002" / "policy")
    assert isinstance(saved, VisionLanguageModel)
    assert len((run / "validation.jsonl").read_bytes().splitlines()) == 4


@pytest.mark.parametrize("family", FAMILIES)
async def test_one_command_trains_on_episodes_with_an_image_in_each_of_two_turns(
    family: str, tmp_path: Path
) -> None:
    write_tiny_vision(tmp_path / "policy", family=family)
    more = "--num-images 2 --chat.max-turns 2 --question count --run.updates 1"
    words = f"{COMMAND} {more} --run.root {tmp_path} --policy {tmp_path / 'policy'}".split()
    assert await squares_main(parse_command(TrainingLaunch, GrpoSquaresConfig, "", words)) == 0
    (run,) = tmp_path.glob("grpo_squares-*")  # noqa: ASYNC240
    (line,) = read_metrics(run / "metrics.jsonl")
    assert line["update/decisions"] == 8 * 2
    assert line["update/log_prob_gap_max"] < 1e-4


def test_more_images_than_turns_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_images is 2.*at most chat.max_turns = 1"):
        GrpoSquaresConfig(num_images=2)


@pytest.mark.slow
async def test_the_pages_questions_about_frames_of_libero_have_answers_that_the_frames_show(
    tmp_path: Path,
) -> None:
    (snippet,) = re.findall(r"```python\n# libero_questions\.py\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(snippet, "libero_questions.py", "exec"), names)
    await names["write_questions"](tmp_path, 2)
    config = config_of(str(tmp_path / "gripper.jsonl"), image_field="image", scorer="exact")
    assert check_prompts(config, tiny_vision(family="qwen3_vl")).image_sizes == ((224, 224),)
    rows = [json.loads(line) for line in (tmp_path / "gripper.jsonl").read_text().splitlines()]
    assert {row["answer"] for row in rows} == {"left", "right"}
    for row in rows:
        # above the table there is a plain wall, but for the hand
        wall = cv2.imread(str(tmp_path / row["image"])).astype(np.float32).mean(axis=2)[35:68]
        left, right = wall[:, 50:98].std(), wall[:, 126:174].std()
        assert row["answer"] == ("left" if left > right else "right")


def test_images_of_validation_are_never_trained_on_and_the_seed_draws_them() -> None:
    config = GrpoSquaresConfig(num_starts=50, num_validation=10)
    trained, held_out = squares_starts(config)
    seeds = [start.seed for start in (*trained, *held_out)]
    assert (len(trained), len(held_out), len(set(seeds))) == (50, 10, 60)
    assert squares_starts(config) == (trained, held_out)


SIZE = 112
"""Pixels of an image, height and width: a whole window of the tower's attention. Each further window is
traced operation by operation."""

DEPTH = 2
"""Blocks of the tower, one of each kind: attention within a window, and over the whole image."""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_counts_the_images(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GrpoSquaresConfig(
        run=RunConfig(name="x", root=str(tmp_path)), size=SIZE, learner=LearnerConfig(micro_batch=4)
    )
    model = tiny_vision(family=family, num_layers=1, depth=DEPTH)
    footprint, team = episode_footprint(config, model), Team.of(model)
    with_images = estimate_run(
        config, team, footprint.observation_tokens, footprint.observation_images
    )
    without = estimate_run(config, team, footprint.observation_tokens)
    assert with_images is not None
    assert without is not None
    assert with_images.conversations is not None
    assert with_images.conversations.images == ((SIZE, SIZE),)
    (tokens,) = count_image_tokens(model, ((SIZE, SIZE),))
    shown = with_images.conversations.rows * tokens * 4  # patches
    added = with_images.memory.terms["activations"] - without.memory.terms["activations"]
    # the tower's blocks keep at least their products, each 32 or 48 numbers for a patch
    assert added > DEPTH * shown * 4 * (3 * 32 + 3 * 48)
    # what is refused without room for it: the images alone, held against torch's tracker
    shortest = ConversationSizes(tokens + 1, 1, 1, rows=4, images=((SIZE, SIZE),))
    tracked = compare_conversations(model, shortest)
    assert abs(tracked.error) <= 0.05
    kept = tracked.estimate.terms["activations"]
    assert with_images.certain.terms["activations"] == kept > 0
    assert without.certain.terms["activations"] == 0
    shows = team.showing(footprint.observation_images)
    available = without.certain.total + kept // 2
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (available, available))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    require_gpu_memory(config, team, torch.device("cuda"))
    with pytest.raises(ConfigError, match="needs more memory than the GPU has free"):
        require_gpu_memory(config, shows, torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"images of a conversation have \d+ tokens"):
        estimate_run(config, team, footprint.observation_tokens, ((448, 448),) * 8)


def test_a_policy_that_reads_text_alone_is_refused_and_a_frozen_tower_stays() -> None:
    config = GrpoSquaresConfig(policy=str(ARITHMETIC_BASE), freeze_vision=True)
    with pytest.raises(ConfigError, match="CausalLanguageModel that reads text alone"):
        load_vision_policy(config)
