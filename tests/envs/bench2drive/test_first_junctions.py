"""The file of first junctions, which the script of `vla_rl.envs.bench2drive.carla_side` writes over a
stand-in for CARLA's map and planner.
"""

import json
import subprocess
import sys
from pathlib import Path

from tests.envs.bench2drive.processes import CARLA_SIDE, ENVIRONMENT, HERE
from vla_rl.envs.driving.scores.bench2drive import FirstJunction
from vla_rl.envs.driving.scores.leaderboard_files import read_first_junctions

ROUTE = (
    '<route id="{}" town="{}"><waypoints><position x="0.0" y="0" z="0"/><position x="20.0" y="0" '
    'z="0"/><position x="{}" y="0" z="0"/></waypoints></route>'
)


def write_junctions(folder: Path, *routes: tuple[str, str, float]) -> tuple[Path, str]:
    """Write the file for routes through towns whose junctions are at 30 to 40 m; its errors."""
    for town in (folder / "maps" / "OpenDrive", folder / "maps" / "Town12" / "OpenDrive"):
        town.mkdir(parents=True)
    (folder / "maps" / "OpenDrive" / "Town01.xodr").write_text("30 40")
    (folder / "maps" / "Town12" / "OpenDrive" / "Town12.xodr").write_text("0 10")
    xml = folder / "routes.xml"
    xml.write_text("<routes>" + "".join(ROUTE.format(*route) for route in routes) + "</routes>")
    out = folder / "first_junctions.json"
    words = ["--routes", str(xml), "--maps", str(folder / "maps"), "--out", str(out)]
    script = str(CARLA_SIDE / "vla_rl_first_junctions.py")
    done = subprocess.run(
        [sys.executable, str(HERE / "stand_in_planner.py"), script, *words],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    return out, done.stderr


def test_first_junctions_of_small_and_large_towns_are_written_and_read(tmp_path: Path) -> None:
    out, errors = write_junctions(
        tmp_path, ("1", "Town12", 60.0), ("2", "Town01", 60.0), ("3", "Town01", 25.0)
    )
    assert "route 1 (3 of 3) on Town12" in errors
    assert read_first_junctions(out) == {
        "1": FirstJunction(1, 60),
        "2": FirstJunction(31, 60),  # 30 points lie before the one at 30 m
        "3": FirstJunction(None, 25),
    }


def test_a_town_without_a_map_is_named_with_both_places(tmp_path: Path) -> None:
    out, errors = write_junctions(tmp_path, ("1", "Town13", 60.0))
    assert not out.exists()
    assert "the map of Town13 is neither" in errors
    assert "OpenDrive/Town13.xodr nor" in errors


def test_the_format_that_is_written_is_the_one_that_is_read(tmp_path: Path) -> None:
    out, _ = write_junctions(tmp_path, ("1", "Town12", 60.0))
    assert json.loads(out.read_text())["format"] == 1
