"""Evaluation on real LIBERO, from the command line: killed, resumed, recorded, and refused where it
makes no sense.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from toy_runs import evaluated
from websockets.asyncio.server import ServerConnection, serve

from vla_rl.actors import LastingForkServers, Runtime
from vla_rl.cli import dry_run, evaluate
from vla_rl.cli.command_line import Command, parse_command
from vla_rl.cli.evaluate import EvalLaunch, ResultRecorder, main
from vla_rl.datasets import open_dataset
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.libero.packages import list_installed_packages
from vla_rl.envs.libero.tasks import Task, find_task, list_tasks
from vla_rl.errors import ConfigError, VlaRlError
from vla_rl.evaluation import RecordFile, make_record, result_table
from vla_rl.evaluation.config import (
    describe_conditions,
    evaluation_conditions,
    one_of_each_kind,
    planned_episodes,
    require_goal_files,
)
from vla_rl.evaluation.tables import change_table, table_title, write_results
from vla_rl.recipes import eval_libero
from vla_rl.recipes.eval_libero import EvalLiberoConfig
from vla_rl.recipes.eval_metaworld import EvalMetaworldConfig
from vla_rl.serving.openpi_messages import decode_message, encode_message
from vla_rl.types import EnvSpec, EpisodeSpec, StopReason, Trajectory

EVAL = [sys.executable, "-m", "vla_rl.recipes.eval_libero"]
LIGHT = {"assets": "stand-ins", "physics": "fast", "quality": "fast", "image_size": 64}
QUICK = ["--assets", "stand-ins", "--physics", "fast", "--quality", "fast", "--image-size", "64"]


def ended(init_state_id: int = 0) -> SimpleNamespace:
    """An episode of one decision that failed: its trajectory, and its record."""
    spec = EpisodeSpec(
        episode_id=0, group_id=0, member=0, env=EnvSpec(id="vla_rl/libero_goal-v0"), task="libero_goal/3", seed=0,
        policy_seed=0,
    )  # fmt: skip
    trajectory = Trajectory(
        episode=spec,
        steps=(),
        final_observation={"instruction": "open it"},
        stop_reason=StopReason.TIME_LIMIT,
        info={"init_state_id": init_state_id, "scene_seed": 0},
    )
    return SimpleNamespace(trajectory=trajectory, record=make_record(trajectory))


def opened_without_simulators(monkeypatch: pytest.MonkeyPatch) -> list[EnvSpec]:
    """The environments that dry runs would open from here on: each takes seconds of a simulator."""
    opened: list[EnvSpec] = []

    async def note(envs: Sequence[EnvSpec], _: SimulatorConfig) -> None:
        opened.extend(envs)

    monkeypatch.setattr(evaluate, "open_each", note)
    return opened


def has_an_episode(root: Path) -> bool:
    return any(file.read_bytes().count(b"\n") for file in root.glob("eval-*/episodes.jsonl"))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as opened:
        yield opened


@pytest.fixture(scope="module")
def servers(runner: asyncio.Runner) -> Iterator[LastingForkServers]:
    """A server that builds the scene once for the evaluations in `runner`."""
    opened = LastingForkServers("tests")
    yield opened
    runner.run(opened.__aexit__())


def kill(plan: list[str], root: Path, _: asyncio.Runner) -> None:
    """Kill the program after its first episode."""
    process = subprocess.Popen([*EVAL, *plan], stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 250
    try:
        while not has_an_episode(root):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def interrupt(plan: list[str], root: Path, runner: asyncio.Runner) -> None:
    """Cancel it in this process after its first episode, and leave half a line, as a kill may."""

    async def evaluate() -> None:
        evaluate = asyncio.create_task(main(parse_command(EvalLaunch, EvalLiberoConfig, "", plan)))
        while not has_an_episode(root):
            assert not evaluate.done()
            await asyncio.sleep(0.02)
        evaluate.cancel()
        await asyncio.wait([evaluate])

    runner.run(evaluate())
    (lines,) = root.glob("eval-*/episodes.jsonl")
    with lines.open("ab") as file:
        file.write(b'{"task":')


@pytest.mark.timeout(400)
@pytest.mark.parametrize("end", [interrupt, pytest.param(kill, marks=pytest.mark.proof)])
def test_an_evaluation_that_was_ended_goes_on_with_what_is_missing_and_keeps_its_record(
    end: Callable[[list[str], Path, asyncio.Runner], None],
    runner: asyncio.Runner,
    servers: LastingForkServers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = [
        "--tasks",
        "1",
        "--init-states",
        "40-43",
        "--step-limit",
        "8",
        "--num-envs",
        "1",
        *QUICK,
    ]
    plan += ["--record-to", str(tmp_path / "data"), "--root", str(tmp_path)]
    monkeypatch.setattr(evaluate, "Runtime", partial(Runtime, fork_servers=servers))
    end(plan, tmp_path, runner)
    capsys.readouterr()
    (folder,) = tmp_path.glob("eval-*")
    before = (folder / "episodes.jsonl").read_bytes()
    resumed = parse_command(EvalLaunch, EvalLiberoConfig, "", ["--resume", str(folder)])
    assert runner.run(main(resumed)) == 0
    printed = capsys.readouterr().out
    assert (folder / "episodes.jsonl").read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    found = json.loads((folder / "results.json").read_text())
    assert sorted(episode["init_state_id"] for episode in found["episodes"]) == [40, 41, 42, 43]
    assert {episode["num_steps"] for episode in found["episodes"]} == {8}
    assert found["conditions"]["assets"] == "stand-ins"
    assert (found["conditions"]["physics"], found["conditions"]["quality"]) == ("fast", "fast")
    assert found["conditions"]["seed"] == 0
    assert len(found["conditions"]["checkpoint_digest"]) == 32
    assert found["tasks"]["libero_object/1"]["wilson_95"][1] == pytest.approx(0.4899, abs=1e-4)
    assert "torch" in found["versions"]["packages"]
    assert "0/4" in printed
    # no video of what ran before; at most three of each task and outcome
    assert all(
        video.name.startswith("libero_object-1_failure_init-4")
        for video in (folder / "videos").iterdir()
    )
    assert len(list((folder / "videos").iterdir())) == 3
    episodes = open_dataset(tmp_path / "data")
    assert sorted(
        json.loads(str(episode.about["options"]))["init_state_id"] for episode in episodes
    ) == [
        40,
        41,
        42,
        43,
    ]
    assert episodes[0].num_steps == 8
    assert episodes[0].observation(7)["wrist_image"].shape == (64, 64, 3)
    assert not np.array_equal(episodes[0].frames["image"](0), episodes[0].frames["image"](7))
    config = msgspec.json.decode((folder / "config.json").read_bytes(), type=EvalLiberoConfig)
    warmer = msgspec.structs.replace(config, temperature=1.0)
    with pytest.raises(
        ConfigError, match=r"temperature is 1\.0, but the episodes in .* were run with None"
    ):
        runner.run(main(Command(EvalLaunch(resume=folder), warmer)))
    wider = msgspec.structs.replace(config, init_states="40-44")
    opened = opened_without_simulators(monkeypatch)
    assert runner.run(main(Command(EvalLaunch(resume=folder, dry_run=True), wider))) == 0
    assert "5 episodes, 4 of them done already" in " ".join(capsys.readouterr().out.split())
    assert len(opened) == 1


def test_a_dry_run_shows_episodes_and_memory_and_runs_nothing(
    runner: asyncio.Runner,
    servers: LastingForkServers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(dry_run, "Runtime", partial(Runtime, fork_servers=servers))
    config = EvalLiberoConfig(
        tasks="1", init_states="40-49", step_limit=8, root=str(tmp_path / "runs"), **LIGHT
    )
    assert runner.run(main(Command(EvalLaunch(dry_run=True), config))) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "10 episodes, 0 of them done already" in text
    assert "8 each, 80 in all" in text
    assert "weights of the policy" in text
    assert "everything that the evaluation would read was found" in text
    assert not os.listdir(tmp_path)


async def test_a_dry_run_of_very_many_environments_opens_one_of_each_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = opened_without_simulators(monkeypatch)
    plan = {"init_states": "0", "assets": "stand-ins", "root": str(tmp_path)}
    few = EvalLiberoConfig(suites=("libero_goal", "libero_10"), **plan)
    assert await main(Command(EvalLaunch(dry_run=True), few)) == 0
    assert len(opened) == 20
    opened.clear()
    printed = capsys.readouterr().out
    assert "300 each, 3000 in all" in printed
    assert "520 each, 5200 in all" in printed
    monkeypatch.setattr(evaluate, "MOST_PREPARED", 19)
    assert await main(Command(EvalLaunch(dry_run=True), few)) == 0
    assert [env.id for env in opened] == ["vla_rl/libero_goal-v0", "vla_rl/libero_10-v0"]
    told = "20 environments: one of each suite and kind of change is opened (2)"
    assert told in " ".join(capsys.readouterr().out.split())


def test_a_sample_has_one_environment_of_each_kind_of_change() -> None:
    if "liberoplus" not in list_installed_packages():
        pytest.skip("liberoplus is in vla_rl/requirements/libero-family.txt")
    some = EvalLiberoConfig(
        suites=("liberoplus.libero_object",), tasks="0-300", init_states="0", assets="stand-ins"
    )
    episodes = planned_episodes(some)
    require_goal_files(episodes)
    kinds = {find_task("liberoplus.libero_object", number).perturbation for number in range(301)}
    sample = one_of_each_kind(episodes)
    found = [find_task("liberoplus.libero_object", env.kwargs["task_id"]) for env in sample]
    assert {task.perturbation for task in found} == kinds
    assert len(sample) == len(kinds) > 1


def test_a_goal_file_that_is_not_there_is_named_before_an_episode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = EvalLiberoConfig(suites=("libero_goal",), tasks="3", init_states="0")
    episodes = planned_episodes(config)
    monkeypatch.setattr(Task, "goal_file", tmp_path / "gone.bddl")
    with pytest.raises(ConfigError, match=r"libero_goal/3 needs .*gone\.bddl, which is not there"):
        require_goal_files(episodes)


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("changed", "resume", "message"),
    [
        ({"checkpoint": "nowhere"}, None, "nowhere is neither a folder nor a hub id"),
        (
            {"norm_key": "libero_goal", "step_limit": 8},
            None,
            "action statistics with no 'libero_goal'",
        ),
        ({"assets": "nowhere"}, None, "LIBERO's assets were not found in nowhere"),
        ({}, Path("nowhere"), "nowhere/config.json cannot be read"),
    ],
)
async def test_what_cannot_be_evaluated_is_refused_by_a_dry_run_too(
    changed: dict[str, Any], resume: Path | None, message: str, dry_run: bool, tmp_path: Path
) -> None:
    config = EvalLiberoConfig(**{"assets": "stand-ins", "root": str(tmp_path), **changed})
    with pytest.raises(VlaRlError) as caught:
        await main(Command(EvalLaunch(resume=resume, dry_run=dry_run), config))
    assert message in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_results_are_plain_json(tmp_path: Path) -> None:
    one = evaluated("libero_goal/3", parts={"steps": 90.0, "attempts": 1.0})
    write_results(tmp_path / "results.json", {"seed": 0}, [one], num_planned=1, num_missing=0)
    found = msgspec.json.decode((tmp_path / "results.json").read_bytes())
    assert found["suites"]["libero_goal"]["success_rate"] == 1.0
    assert found["episodes"][0]["num_steps"] == 90
    assert found["is_complete"]
    assert not list(tmp_path.glob("*.part"))


def test_perturbations_have_rates_and_a_table_of_their_own(tmp_path: Path) -> None:
    outcomes = [
        ("libero_goal", "", True),
        ("liberopro.libero_goal_swap", "swap", True),
        ("liberopro.libero_goal_swap", "swap", False),
        ("liberopro.libero_10_lan", "language", True),
    ]
    records = [
        evaluated(f"{suite}/3", number, is_success, perturbation=kind)
        for number, (suite, kind, is_success) in enumerate(outcomes)
    ]
    write_results(tmp_path / "results.json", {}, records, num_planned=4, num_missing=0)
    found = msgspec.json.decode((tmp_path / "results.json").read_bytes())["perturbations"]
    assert {kind: (rates["successes"], rates["episodes"]) for kind, rates in found.items()} == {
        "swap": (1, 2),
        "language": (1, 1),
    }
    table = change_table(records, "mine")
    assert [column.header for column in table.columns] == [
        "change", "libero_goal", "libero_10", "all",
    ]  # fmt: skip
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert rows == [
        ("none", "1/1 = 100.0 % (20.7 to 100.0)", "-", "1/1 = 100.0 % (20.7 to 100.0)"),
        ("swap", "1/2 = 50.0 % (9.5 to 90.5)", "-", "1/2 = 50.0 % (9.5 to 90.5)"),
        ("language", "-", "1/1 = 100.0 % (20.7 to 100.0)", "1/1 = 100.0 % (20.7 to 100.0)"),
    ]


def test_a_suite_of_thousands_of_tasks_has_one_row() -> None:
    records = [evaluated(f"liberoplus.libero_goal/{number}") for number in range(91)]
    assert [*result_table(records, "mine").columns[0].cells] == ["liberoplus.libero_goal"]
    assert len([*result_table(records[:90], "mine").columns[0].cells]) == 91


def test_some_kinds_of_change_are_run_alone() -> None:
    if "liberoplus" not in list_installed_packages():
        pytest.skip("liberoplus is in vla_rl/requirements/libero-family.txt")
    suite = "liberoplus.libero_object"
    kinds = ("camera", "robot")
    some = EvalLiberoConfig(suites=(suite,), perturbations=kinds, init_states="0")
    chosen = {episode.env.kwargs["task_id"] for episode in planned_episodes(some)}
    assert chosen == {task.task_id for task in list_tasks(suite) if task.perturbation in kinds}
    with pytest.raises(ConfigError, match=r"perturbations is .*'camra'.*, expected .*camera, "):
        EvalLiberoConfig(suites=(suite,), perturbations=("camra",), init_states="0")
    both = EvalLiberoConfig(suites=("libero_object", suite), perturbations=("none",), tasks="0")
    assert {episode.task for episode in planned_episodes(both)} == {"libero_object/0"}


def test_trials_have_the_fixtures_of_published_evaluations_unless_the_command_line_says_otherwise() -> (
    None
):
    plan = {"suites": ("libero_goal",), "tasks": "3", "init_states": "0-1", "assets": "stand-ins"}
    published, same = (EvalLiberoConfig(**plan), EvalLiberoConfig(**plan, scenes="same"))
    assert [e.env.kwargs.get("scenes") for e in planned_episodes(published)] == ["published"] * 2
    assert [e.env.kwargs.get("scenes") for e in planned_episodes(same)] == [None] * 2
    assert (evaluation_conditions(published)["scenes"], evaluation_conditions(same)["scenes"]) == (
        "published",
        "same",
    )


async def test_an_evaluation_older_than_the_choice_of_scenes_goes_on_with_the_same_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = opened_without_simulators(monkeypatch)
    config = EvalLiberoConfig(
        suites=("libero_object",), tasks="1", init_states="0", scenes="same", assets="stand-ins"
    )
    for name, record in (
        ("config.json", config),
        ("conditions.json", evaluation_conditions(config)),
    ):
        older = {
            key: value for key, value in msgspec.to_builtins(record).items() if key != "scenes"
        }
        (tmp_path / name).write_bytes(msgspec.json.encode(older))
    (tmp_path / "episodes.jsonl").write_bytes(msgspec.json.encode(ended().record) + b"\n")
    assert await main(Command(EvalLaunch(resume=tmp_path, dry_run=True), config)) == 0
    assert [env.id for env in opened] == ["vla_rl/libero_object-v0"]
    resumed = parse_command(EvalLaunch, EvalLiberoConfig, "", ["--resume", str(tmp_path)])
    assert resumed.config == config
    fresh = ["--config", str(tmp_path / "config.json")]
    assert parse_command(EvalLaunch, EvalLiberoConfig, "", fresh).config.scenes == "published"
    published = msgspec.structs.replace(config, scenes="published")
    with pytest.raises(
        ConfigError, match=r"scenes is 'published', but the episodes in .* were run with 'same'"
    ):
        await main(Command(EvalLaunch(resume=tmp_path, dry_run=True), published))


@pytest.mark.parametrize(
    ("suites", "message"),
    [
        (("libero_gaol",), "suites: suite is 'libero_gaol', did you mean 'libero_goal'"),
        (("libero_goal_swap",), "suites: suite is 'libero_goal_swap', did you mean"),
    ],
)
def test_a_suite_that_is_not_there_is_refused(suites: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvalLiberoConfig(suites=suites)


def test_an_interrupted_evaluation_says_that_it_is_incomplete(tmp_path: Path) -> None:
    title = table_title(
        "mine", {"assets": "stand-ins", "scenes": "same"}, num_planned=200, num_missing=197
    )
    assert title == (
        "mine, assets: stand-ins, scenes: same; incomplete: 3 of 200 episodes, those running were "
        "lost, so rates favour "
        "short ones"
    )
    whole = table_title(
        "mine", {"assets": "LIBERO", "scenes": "published"}, num_planned=3, num_missing=0
    )
    assert whole == "mine, assets: LIBERO, scenes: published"
    write_results(tmp_path / "results.json", {}, [ended().record], num_planned=200, num_missing=199)
    found = msgspec.json.decode((tmp_path / "results.json").read_bytes())
    assert (found["is_complete"], found["missing_episodes"]) == (False, 199)


def test_a_table_says_what_another_one_has_to_share_to_be_comparable() -> None:
    config = EvalLiberoConfig(
        checkpoint="mine", suites=("libero_goal", "libero_10"), init_states="40-49", temperature=0.5
    )
    assert describe_conditions(config) == (
        "physics exact, quality exact, images of 256 x 256 pixels; at most 300 (libero_goal), 520 "
        "(libero_10) control steps; actions: sampled at temperature 0.5; initial states: 40-49"
    )
    config = EvalMetaworldConfig(checkpoint="mine", suites=("metaworld_mt10",))
    assert describe_conditions(config) == (
        "quality fast, images of 84 x 84 pixels; at most 500 control steps; actions: "
        "greedy; initial states: all"
    )


def test_an_asset_that_is_missing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("scenes", "textures"):
        (tmp_path / "assets" / name).mkdir(parents=True)
    command = ["eval_libero", "--suites", "libero_goal", "--tasks", "0", "--init-states", "0"]
    where = ["--assets", str(tmp_path / "assets"), "--root", str(tmp_path), "--videos", "none"]
    monkeypatch.setattr(sys, "argv", [*command, *where])
    assert eval_libero.cli() == 1
    told = capsys.readouterr().err
    assert told.startswith("error: AssetError: the LIBERO assets in ")
    assert "libero_goal/0 needs scenes/libero_tabletop_base_style.xml. Install them" in told
    assert "Traceback" not in told


async def test_a_video_that_cannot_be_written_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(evaluate, "write_video", full_disk)
    with RecordFile(tmp_path / "episodes.jsonl") as file:
        recorder = ResultRecorder(EvalLiberoConfig(), file, tmp_path)
        for state in (3, 4):
            await recorder.keep(ended(state).trajectory)
    with RecordFile(tmp_path / "episodes.jsonl") as file:
        assert [record.start for record in file.records] == [3, 4]
    assert recorder.num_failed_videos == 2
    assert caplog.text.count("no space left") == 1


async def test_a_policy_that_a_server_has_is_evaluated_resumed_and_told_from_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = {"policy": "theirs"}
    asked: list[dict[str, Any]] = []

    async def answer(connection: ServerConnection) -> None:
        await connection.send(encode_message(named))
        async for frame in connection:
            assert isinstance(frame, bytes)
            asked.append(decode_message(frame))
            await connection.send(encode_message({"actions": np.zeros((10, 7))}))

    async with serve(answer, "127.0.0.1", 0, compression=None) as server:
        address = f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        plan = [
            address, *QUICK, "--suites", "libero_goal", "--tasks", "7", "--init-states", "0-1", "--step-limit", "20",
            "--num-envs", "1", "--server.replan", "5", "--root", str(tmp_path),
        ]  # fmt: skip
        assert await main(parse_command(EvalLaunch, EvalLiberoConfig, "", plan)) == 0
        assert len(asked) == 2 * 20 // 5
        assert asked[0]["observation/image"].shape == (64, 64, 3)
        assert asked[0]["observation/state"].shape == (8,)
        assert asked[0]["prompt"] == "turn on the stove"
        printed = capsys.readouterr().out
        assert f"policy server {address} says policy: theirs" in printed
        assert "Answers of the policy server" in printed
        run = printed.rpartition("of this evaluation is in ")[2].strip()
        named["policy"] = "another"
        with pytest.raises(ConfigError, match="checkpoint_digest is"):
            await main(parse_command(EvalLaunch, EvalLiberoConfig, "", [*plan, "--resume", run]))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["ws://127.0.0.1:9", "--temperature", "1"], "was told how to act when it was started"),
        (["ws://127.0.0.1:9", "--norm-key", "libero_goal"], "norm_key is 'libero_goal'"),
        (["shipped", "--server.replan", "5"], "an address such as ws://"),
    ],
)
def test_options_that_a_policy_elsewhere_cannot_follow_are_refused(
    options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((ConfigError, SystemExit)) as raised:
        parse_command(EvalLaunch, EvalLiberoConfig, "", options)
    said = capsys.readouterr().err + str(raised.value)
    assert problem in " ".join(said.replace("│", " ").split())
