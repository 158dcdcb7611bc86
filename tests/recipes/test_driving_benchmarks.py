"""The recipes of Bench2Drive and NavSim."""

import asyncio
import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driving_stand_ins import drive, export, route_server

from tests.envs.driving.scores.drawn import draw_scene
from tests.envs.driving.scores.test_bench2drive import write_ride
from vla_rl.cli.command_line import Command, Launch, TrainingLaunch
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.driving.scores.leaderboard_files import DIGESTS
from vla_rl.errors import ConfigError
from vla_rl.models.shipped import ASSETS
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes import (
    driving_training,
    eval_bench2drive,
    eval_navsim,
    grpo_bench2drive,
    sft_driving,
)
from vla_rl.recipes.driving_training import IMAGE_SIZE, HeldOutScenesConfig
from vla_rl.recipes.eval_bench2drive import EvalBench2DriveConfig
from vla_rl.recipes.eval_navsim import EvalNavsimConfig
from vla_rl.recipes.grpo_bench2drive import GrpoBench2DriveConfig
from vla_rl.recipes.grpo_navsim import GrpoNavsimConfig
from vla_rl.rollout import SchedulerConfig

BASE = str(ASSETS / "driving_base")


async def test_a_served_policy_drives_until_it_is_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EvalBench2DriveConfig(
        policy=BASE, port=0, host="127.0.0.1", device="cpu", by_mean=True, temperature=0.4
    )
    command = Command(launch=Launch(), config=config)
    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(eval_bench2drive.main(command))
        printed = ""
        while "stop with Ctrl-C" not in printed:
            await asyncio.sleep(0.01)
            printed += capsys.readouterr().out
        port = int(printed.rpartition(";")[0].rpartition(":")[2])
        status, errors = await drive(tmp_path, port, size=IMAGE_SIZE, cameras="front")
        assert status == 0, errors
        os.kill(os.getpid(), signal.SIGINT)
        assert await serving == 128 + signal.SIGINT
    assert "1 routes were driven to their end" in capsys.readouterr().out


async def test_a_policy_learns_on_served_routes(tmp_path: Path) -> None:
    with route_server("--ticks", "25") as server:
        config = GrpoBench2DriveConfig(
            run=RunConfig(name="routes", root=str(tmp_path), updates=1, device="cpu"),
            servers=(server,),
            routes=("7",),
            group_size=2,
            scheduler=SchedulerConfig(groups_per_update=1, max_staleness=0),
        )
        command = Command(launch=TrainingLaunch(), config=config)
        assert await grpo_bench2drive.main(command) == 0
    (row,) = metrics_in(tmp_path)
    assert row["score/completion"] > 0.0
    assert row["score/driving_score"] == pytest.approx(100 * row["score/total"])


def metrics_in(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics of the only run in a folder."""
    (metrics,) = folder.glob("routes*/metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


async def test_the_table_has_abilities_and_smoothness_if_their_files_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = hashlib.sha256(b"7,8").hexdigest()
    monkeypatch.setitem(DIGESTS, digest, "bench2drive220")
    routes, results, out = tmp_path / "r.xml", tmp_path / "results.json", tmp_path / "table.json"
    turns = '<scenarios><scenario type="T_Junction"/></scenarios>'
    routes.write_text(
        f'<routes><route id="7">{turns}</route><route id="8">{turns}</route></routes>'
    )
    record = {
        "route_id": "RouteScenario_7_rep0",
        "save_name": "drive_of_7",
        "status": "Failed",
        "scores": {"score_route": 30.0},
        "infractions": {"red_light": [], "stop_infraction": []},
    }
    results.write_text(json.dumps({"_checkpoint": {"records": [record]}}))
    entry = {"point": 12, "num_points": 100}
    junctions = tmp_path / "junctions.json"
    junctions.write_text(json.dumps({"format": 1, "routes": {"7": entry, "8": entry}}))
    write_ride(tmp_path / "drive_of_7", 10.0)
    config = EvalBench2DriveConfig(
        results=(str(results),),
        routes=str(routes),
        first_junctions=str(junctions),
        rides=str(tmp_path),
        out=str(out),
    )
    assert await eval_bench2drive.main(Command(launch=Launch(), config=config)) == 0
    printed = capsys.readouterr().out
    assert "traffic_signs    100.00 %   1 of 1 routes" in printed
    assert "1 routes that were not driven are left out" in printed
    assert "merging               -     0 of 0 routes" in printed
    written = json.loads(out.read_bytes())
    assert written["driving_score"] == pytest.approx(30.0 / 220)
    assert written["smoothness"] == {"as_published": 0.0, "corrected": 1.0}
    assert written["abilities"]["mean"] is None
    assert written["abilities"]["abilities"]["traffic_signs"]["num_successes"] == 1


def test_files_for_the_table_without_results_are_refused() -> None:
    for option in ("first_junctions", "rides"):
        config = EvalBench2DriveConfig(**{"policy": BASE, option: "file"})
        with pytest.raises(ConfigError, match=f"{option} is 'file' without results"):
            config.require_source()


async def test_a_table_of_another_route_set_than_it_names_is_refused(tmp_path: Path) -> None:
    routes = tmp_path / "routes.xml"
    routes.write_text('<routes><route id="7"/></routes>')
    config = EvalBench2DriveConfig(results=("results.json",), routes=str(routes))
    with pytest.raises(ConfigError, match="no known route set, but the table names bench2drive220"):
        await eval_bench2drive.main(Command(launch=Launch(), config=config))
    with pytest.raises(ConfigError, match="give --routes, because a table must name its route set"):
        EvalBench2DriveConfig(results=("results.json",)).require_source()
    with pytest.raises(ConfigError, match="give --policy or --results"):
        EvalBench2DriveConfig().require_source()
    assert "by_mean" in config.unused_options()  # there is no policy that acts
    other = EvalBench2DriveConfig(policy=BASE, cameras=("image", "image_roof"))
    with pytest.raises(ConfigError, match="expected image and any of"):
        await eval_bench2drive.main(Command(launch=Launch(), config=other))


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four frames, of which two form the second stage of the others."""
    root = tmp_path_factory.mktemp("navsim")
    frames: dict[str, dict[str, Any]] = {
        "before": {},
        "now": {},
        "late_before": {"synthetic": True},
        "late_now": {"synthetic": True},
    }
    done = export(root, frames, [["now", "before", [["late_now", "late_before"]]]])
    assert done.returncode == 0, done.stderr
    return root / "scenes"


async def evaluate(config: EvalNavsimConfig, dry_run: bool = False) -> int:
    return await eval_navsim.main(Command(launch=Launch(dry_run=dry_run), config=config))


def write_plans(path: Path, tokens: list[str]) -> str:
    waypoints = np.array([draw_scene(number)[1][0] for number in range(len(tokens))])
    np.savez(path, tokens=np.array(tokens), waypoints=waypoints, interval_s=0.5)
    return str(path)


def results_in(folder: Path) -> tuple[str, str]:
    """The metrics and the last checkpoint's policy of the only run in a folder."""
    (metrics,) = folder.glob("navsim*/metrics.jsonl")
    (policy,) = folder.glob("navsim*/checkpoints/*/policy")
    return metrics.read_text(), str(policy)


async def test_the_table_of_a_file_of_plans_is_printed_and_written(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = write_plans(tmp_path / "plans.npz", ["before", "now", "late_before", "late_now"])
    out = tmp_path / "table.json"
    config = EvalNavsimConfig(scenes=str(scenes), plans=plans, out=str(out))
    assert await evaluate(config, dry_run=True) == 0
    assert await evaluate(config) == 0
    printed = capsys.readouterr().out
    assert "epdms_v2, 4 scenes" in printed
    assert "score, both stages" in printed
    written = json.loads(out.read_text())
    assert len(written["stages"]) == 2
    assert "extended_comfort" in written["stages"][0]


async def test_a_policy_learns_on_recorded_scenes_and_its_table_is_printed(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = GrpoNavsimConfig(
        run=RunConfig(name="navsim", root=str(tmp_path), updates=1, device="cpu"),
        folder=str(scenes),
        held_out_folder=str(scenes),
        reward_of="total=1,ego_progress=0.2",
        policy=BASE,
        group_size=2,
        scheduler=SchedulerConfig(groups_per_update=1, max_staleness=0),
        held_out=HeldOutScenesConfig(scenes=0),
        simulators=SimulatorConfig(num_envs=1),
    )
    assert await driving_training.main(Command(launch=TrainingLaunch(), config=config)) == 0
    metrics, checkpoint = results_in(tmp_path)
    assert "score/ego_progress" in metrics
    table = tmp_path / "table.json"
    by_mean = EvalNavsimConfig(
        scenes=str(scenes),
        policy=checkpoint,
        num_envs=1,
        by_mean=True,
        temperature=0.4,
        out=str(table),
    )
    assert await evaluate(by_mean) == 0
    assert "score, both stages" in capsys.readouterr().out
    actions = json.loads(table.read_text())["actions"]
    assert actions == "greedy, by the means of tokens at temperature 0.4"


async def test_what_does_not_fit_is_named_before_anything_runs(
    scenes: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="give --policy or --plans"):
        await evaluate(EvalNavsimConfig(scenes=str(scenes)))
    with pytest.raises(ConfigError, match="has no scene files"):
        await evaluate(EvalNavsimConfig(scenes=str(tmp_path), policy=BASE))
    plans = write_plans(tmp_path / "plans.npz", ["before", "now"])
    with pytest.raises(ConfigError, match="2 of 4 scenes have no plan, such as late_before"):
        await evaluate(EvalNavsimConfig(scenes=str(scenes), plans=plans))
    sft_driving.new_policy(0, "moves", route_points=10).save(tmp_path / "reads_the_route")
    reads = EvalNavsimConfig(scenes=str(scenes), policy=str(tmp_path / "reads_the_route"))
    with pytest.raises(ConfigError, match="reads 10 points of the route, but these scenes come"):
        await evaluate(reads)
    with pytest.raises(ConfigError, match="reward_of is 'speed'"):
        GrpoNavsimConfig(reward_of="speed")
    with pytest.raises(ConfigError, match="has no scene files"):
        driving_training.training_starts(GrpoNavsimConfig(folder=str(tmp_path / "none")))
