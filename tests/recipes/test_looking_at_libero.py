"""`watch_libero` shows episodes; `parity` compares two ways to run one."""

import asyncio
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from vla_rl.cli.command_line import Command, Launch, parse_command
from vla_rl.errors import ConfigError
from vla_rl.evaluation.contact_sheets import WatchedEpisode
from vla_rl.evaluation.parity import read_trace, write_trace
from vla_rl.evaluation.records import EpisodeRecord
from vla_rl.models.shipped import BASE_POLICY, SHIPPED
from vla_rl.recipes import parity, watch_libero
from vla_rl.recipes.parity import ParityConfig, parse_way
from vla_rl.recipes.watch_libero import WatchConfig, main
from vla_rl.types import EnvSpec, EpisodeSpec, Sampling


def test_an_expert_is_watched_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import cv2

    video = tmp_path / "out.mp4"
    command = ["watch_libero", "--suite", "libero_object", "--task-ids", "3"]
    options = [
        "--policy",
        "expert",
        "--assets",
        "stand-ins",
        "--physics",
        "fast",
        "--quality",
        "fast",
    ]
    monkeypatch.setattr(
        sys, "argv", [*command, *options, "--image-size", "64", "--video", str(video)]
    )
    assert watch_libero.cli() == 0
    printed = capsys.readouterr().out
    assert "libero_object/3 from 0: success after" in printed
    assert "1 of 1 episodes succeeded (assets: stand-ins, physics: fast)" in " ".join(
        printed.split()
    )
    num_steps = int(printed.split("success after ")[1].split()[0])
    capture = cv2.VideoCapture(str(video))
    frames = []
    while (read := capture.read())[0]:
        frames.append(read[1])
    capture.release()
    # one frame before the first control step, one after each, and the last one for another 19
    assert len(frames) == num_steps + 20
    assert frames[0].shape[1] == 256
    image = frames[0][:256]
    assert image.std() > 5
    assert frames[0][256:].max() > 100  # white letters on black
    assert abs(frames[0][:256].astype(int) - frames[num_steps // 2][:256]).max() > 50


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"policy": "expert"}, (224, "exact")),
        ({"policy": SHIPPED}, (84, "fast")),
        ({"policy": str(BASE_POLICY)}, (84, "fast")),
        ({"policy": str(BASE_POLICY / ".." / BASE_POLICY.name)}, (84, "fast")),
        ({"policy": str(BASE_POLICY.parent)}, (256, "exact")),
        ({"policy": str(BASE_POLICY), "image_size": 64, "quality": "exact"}, (64, "exact")),
    ],
)
def test_a_checkpoint_sees_images_as_in_its_training(
    changed: dict[str, Any], expected: tuple[int, str]
) -> None:
    config = WatchConfig(**changed)
    assert (config.scene.image_size, config.scene.quality) == expected


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ([], Sampling(greedy=True)),
        (["--temperature", "1"], Sampling()),
        (["--no-is-greedy"], Sampling()),
        (["--by-mean"], Sampling(greedy=True, by_mean=True)),
    ],
)
def test_a_checkpoint_is_watched_as_it_is_evaluated(options: list[str], sampling: Sampling) -> None:
    command = parse_command(Launch, WatchConfig, "", ["--policy", SHIPPED, *options])
    assert command.config.sampling == sampling


def test_an_expert_has_no_tokens_to_act_by() -> None:
    with pytest.raises(ConfigError, match="by_mean is True, but nothing would read it: policy is"):
        parse_command(Launch, WatchConfig, "", ["--policy", "expert", "--by-mean"])


async def test_the_loop_goes_on_while_an_expert_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    is_going_on, loop = threading.Event(), asyncio.get_running_loop()

    def waits_for_the_loop(env: object, init_state_id: int, has_frames: bool) -> WatchedEpisode:
        # from inside, so that only a loop that turns meanwhile sets it
        loop.call_soon_threadsafe(is_going_on.set)
        assert is_going_on.wait(20)
        record = EpisodeRecord(
            task="libero_object/3",
            start=init_state_id,
            seed=0,
            weights=0,
            member=0,
            value=1.0,
            parts={"steps": 7.0, "attempts": 1.0},
            instruction="pick it up",
        )
        return WatchedEpisode(record, [])

    monkeypatch.setattr(
        watch_libero, "LiberoEnv", lambda *_, **__: SimpleNamespace(close=lambda: None)
    )
    monkeypatch.setattr(watch_libero, "run_expert", waits_for_the_loop)
    config = WatchConfig(task_ids=(3,), assets="stand-ins")
    async with asyncio.timeout(30):
        assert await main(Command(Launch(), config)) == 0


async def test_random_actions_are_watched_as_evaluations_run_a_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import cv2

    whole = watch_libero._episode

    def short(*args: Any) -> EpisodeSpec:
        """An episode of 20 control steps: the suite's own limit is 280."""
        spec = whole(*args)
        env = EnvSpec(id=spec.env.id, kwargs={**spec.env.kwargs, "step_limit": 20})
        return msgspec.structs.replace(spec, env=env)

    monkeypatch.setattr(watch_libero, "_episode", short)
    config = WatchConfig(
        task_ids=(3,), policy="random", assets="stand-ins", physics="fast", quality="fast", image_size=64,
        init_states=(4,), video=tmp_path / "out.mp4",
    )  # fmt: skip
    assert await main(Command(Launch(), config)) == 0
    assert "libero_object/3 from 4: failure after 20 control steps" in capsys.readouterr().out
    capture = cv2.VideoCapture(str(config.video))
    num_frames = 0
    while capture.read()[0]:
        num_frames += 1
    capture.release()
    assert num_frames == 1 + 20 + 19


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"policy": "nobody"},
            "policy is 'nobody', expected expert, random, shipped or the folder of a checkpoint",
        ),
        ({"task_ids": (12,)}, "task_id is 12, expected 0 to 9"),
        ({"init_states": (-1,)}, r"init_states is \(-1,\), expected numbers from 0 to 2147483647"),
        ({"video": Path("out.gif")}, "expected a file that ends in .mp4"),
    ],
)
def test_what_cannot_be_watched_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WatchConfig(**changed)


@pytest.mark.parametrize("policy", ["expert", "random"])
def test_assets_that_lack_a_file_are_named_in_one_line(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("scenes", "textures"):
        (tmp_path / name).mkdir()
    command = ["watch_libero", "--policy", policy, "--suite", "libero_goal", "--task-ids", "0"]
    monkeypatch.setattr(sys, "argv", [*command, "--assets", str(tmp_path)])
    assert watch_libero.cli() != 0
    told = capsys.readouterr().err
    assert "libero_goal/0 needs scenes/libero_tabletop_base_style.xml. Install them" in told
    assert "Traceback" not in told


def test_a_folder_that_is_no_folder_of_assets_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["watch_libero", "--policy", "expert", "--assets", "nowhere"])
    assert watch_libero.cli() == 2
    assert "error: LIBERO's assets were not found in nowhere" in capsys.readouterr().err


def options(**changed) -> Command[Launch, ParityConfig]:
    short = {"step_limit": 8, "assets": "stand-ins", "decisions": 1}
    return Command(Launch(), ParityConfig(**{**short, **changed}))


@pytest.mark.slow
async def test_our_loop_equals_its_own_trace_and_a_changed_token_is_named(tmp_path, capsys) -> None:
    alone = options(first="fast", second="none", save=tmp_path, decisions=None)
    assert await parity.main(alone) == 0
    path = tmp_path / "a.jsonl"
    assert await parity.main(options(first=str(path), second="fast")) == 0
    assert "all values of 1 decisions are equal" in capsys.readouterr().out
    trace = read_trace(path)
    entries = tuple(
        msgspec.structs.replace(entry, value=entry.value + 1)
        if entry.boundary == "tokens" and isinstance(entry.value, np.ndarray)
        else entry
        for entry in trace.entries
    )
    write_trace(tmp_path / "b.jsonl", msgspec.structs.replace(trace, entries=entries))
    assert await parity.main(options(first=str(path), second=str(tmp_path / "b.jsonl"))) == 1
    said = capsys.readouterr().out
    assert "the first difference is in the tokens of decision 0" in said
    assert "usual reasons: weights" in said


async def test_a_trace_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the trace away\.jsonl does not exist"):
        await parity.main(options(first="away.jsonl"))


def test_settings_that_do_not_exist_are_refused() -> None:
    assert parse_way("fast").physics == "fast"
    assert parse_way("physics=fast,quality=exact").quality == "exact"
    with pytest.raises(ConfigError, match="expected exact, fast, or physics, quality"):
        parse_way("quick")
    with pytest.raises(ConfigError, match="physics is 'slow', expected one of 'exact', 'fast'"):
        parse_way("physics=slow")
