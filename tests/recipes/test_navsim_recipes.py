"""The NavSim recipes on scenes that the exporter wrote, as small as they go."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.envs.driving.scores.drawn_scenes import draw_scene
from tests.envs.navsim.exported import export
from vla_rl.cli.command_line import Command, Launch, TrainingLaunch
from vla_rl.env_workers import SimulatorConfig
from vla_rl.errors import ConfigError
from vla_rl.models.loading import ASSETS
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes import driving_training, eval_navsim, sft_driving
from vla_rl.recipes.driving_training import HeldOutScenesConfig
from vla_rl.recipes.eval_navsim import EvalNavsimConfig
from vla_rl.recipes.grpo_navsim import GrpoNavsimConfig
from vla_rl.rollout import SchedulerConfig

BASE = str(ASSETS / "driving_base")


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
    assert await evaluate(EvalNavsimConfig(scenes=str(scenes), policy=checkpoint, num_envs=1)) == 0
    assert "score, both stages" in capsys.readouterr().out


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
        driving_training.starts_of(GrpoNavsimConfig(folder=str(tmp_path / "none")))
