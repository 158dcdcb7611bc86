"""The recorder of demonstrations: end to end, and what it refuses before anything is simulated."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from vla_rl.envs.libero import LiberoEnv
from vla_rl.envs.libero.assets import Assets
from vla_rl.errors import ConfigError, EnvError
from vla_rl.recipes import record_demonstrations
from vla_rl.recipes.record_demonstrations import RecordConfig, task_folder, write_settings


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"suite": "libero_91"},
            "suite is 'libero_91', expected one of libero_spatial, libero_object",
        ),
        ({"init_state_ids": (-1,)}, "expected numbers from 0 to 2147483647, at least one, or none"),
        ({"task_ids": (1, 99)}, "task_id is 99, expected 0 to 9: libero_object has 10 tasks"),
    ],
)
def test_a_configuration_that_cannot_be_recorded_is_refused(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RecordConfig(**changed)


def test_a_folder_of_demonstrations_is_gone_on_with_only_as_it_was_recorded(tmp_path: Path) -> None:
    assets = Assets(tmp_path / "assets", "configured")
    config = RecordConfig(out=str(tmp_path / "demos"))
    write_settings(config, assets)
    write_settings(msgspec.structs.replace(config, num=40, workers=2, task_ids=(1, 2)), assets)
    with pytest.raises(ConfigError, match=r"noise is 0\.0 now, but .*1\.settings\.json says 0\.25"):
        write_settings(msgspec.structs.replace(config, noise=0.0), assets)
    with pytest.raises(ConfigError, match=r"assets is .*others"):
        write_settings(config, Assets(tmp_path / "others", "configured"))


def test_demonstrations_of_unknown_settings_are_left_alone(tmp_path: Path) -> None:
    config = RecordConfig(out=str(tmp_path))
    folder = task_folder(config, 1)
    folder.mkdir(parents=True)
    (folder / "0000.npz").write_bytes(b"")
    with pytest.raises(
        ConfigError,
        match=r"holds demonstrations, but .*1\.settings\.json, their settings, is missing",
    ):
        write_settings(config, Assets(tmp_path, "configured"))


def test_an_environments_own_error_ends_it_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(command: object) -> int:
        raise EnvError("mujoco is 3.9")

    monkeypatch.setattr(record_demonstrations, "main", broken)
    monkeypatch.setattr(sys, "argv", ["record_demonstrations"])
    assert record_demonstrations.cli() == 2
    assert capsys.readouterr().err == "error: mujoco is 3.9\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "task_ids",
    # in the suite, one worker of two has a task: the other one solves it as well, at the same cost
    [pytest.param(("7", "8"), marks=pytest.mark.proof), ("7",)],
    ids=["both record", "one records"],
)
def test_what_two_workers_record_replays_to_success(
    task_ids: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["record_demonstrations", "--suite", "libero_goal", "--out", str(tmp_path)]
    tasks = [
        "--task-ids",
        *task_ids,
        "--num",
        "1",
        "--scene-seeds",
        "5",
        "--workers",
        "2",
        "--noise",
        "0.25",
    ]
    looks = ["--assets", "stand-ins", "--image-size", "32", "--no-wrist-image", "--quality", "fast"]
    monkeypatch.setattr(sys, "argv", [*command, *tasks, *looks])
    assert record_demonstrations.cli() == 0
    for task_id in map(int, task_ids):
        files = sorted((tmp_path / "libero_goal" / str(task_id)).iterdir())
        assert [file.name for file in files] == ["0000.npz"]
        with np.load(files[0], allow_pickle=False) as saved:
            recorded = dict(saved)
        assert recorded["scene_seed"] == 5
        assert str(recorded["task"]) == f"libero_goal/{task_id}"
        assert (recorded["executed_action"] != recorded["action"]).any(axis=1).all()
        _replay(recorded, task_id)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_end_with_a_recorder_that_is_killed(tmp_path: Path) -> None:
    recording = (sys.executable, "-m", "vla_rl.recipes.record_demonstrations", "--workers", "1")
    options = ("--out", str(tmp_path), "--task-ids", "1", "--assets", "stand-ins", "--num", "30")
    with subprocess.Popen([*recording, *options, "--image-size", "16"]) as recorder:
        # killed in the middle of a task, which lasts for minutes
        while not (first := list(tmp_path.glob("*/1/0000.npz"))) and recorder.poll() is None:
            time.sleep(0.1)
        workers = psutil.Process(recorder.pid).children(recursive=True)
        recorder.kill()
    assert first
    assert len(workers) >= 1
    assert psutil.wait_procs(workers, timeout=30)[1] == []


def _replay(recorded: dict[str, np.ndarray], task_id: int) -> None:
    """The executed actions, run again from the same start, give the same states, and succeed
    with the last one.

    The first image is the same too: in the quality that was asked for.
    """
    env = LiberoEnv(
        "libero_goal",
        task_id,
        "stand-ins",
        image_size=32,
        wrist_image=False,
        scene_seed=int(recorded["scene_seed"]),
        physics="fast",
        quality="fast",
    )
    env.render_every_step = False
    try:
        observation, _ = env.reset(options={"init_state_id": int(recorded["init_state_id"])})
        np.testing.assert_array_equal(observation["image"], recorded["image"][0])
        ends = []
        for state, action in zip(recorded["state"], recorded["executed_action"], strict=True):
            np.testing.assert_array_equal(observation["state"], state)
            observation, _, terminated, _, _ = env.step(action)
            ends.append(terminated)
    finally:
        env.close()
    assert ends == [False] * (len(ends) - 1) + [True]
