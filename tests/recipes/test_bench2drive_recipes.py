"""The Bench2Drive recipes with a stand-in for CARLA and its leaderboard, as small as they go."""

import asyncio
import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.envs.bench2drive.processes import drive, route_server
from tests.envs.driving.scores.test_leaderboard_files import write_ride
from vla_rl.cli.command_line import Command, Launch, TrainingLaunch
from vla_rl.envs.driving.scores.leaderboard_files import DIGESTS
from vla_rl.errors import ConfigError
from vla_rl.models.loading import ASSETS
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes import eval_bench2drive, grpo_bench2drive
from vla_rl.recipes.driving_training import IMAGE_SIZE
from vla_rl.recipes.eval_bench2drive import EvalBench2DriveConfig
from vla_rl.recipes.grpo_bench2drive import GrpoBench2DriveConfig
from vla_rl.rollout import SchedulerConfig

BASE = str(ASSETS / "driving_base")


async def test_a_served_policy_drives_until_it_is_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EvalBench2DriveConfig(policy=BASE, port=0, host="127.0.0.1", device="cpu")
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
    other = EvalBench2DriveConfig(policy=BASE, cameras=("image", "image_roof"))
    with pytest.raises(ConfigError, match="expected image and any of"):
        await eval_bench2drive.main(Command(launch=Launch(), config=other))
