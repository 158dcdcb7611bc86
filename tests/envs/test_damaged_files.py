"""Files that other programs wrote, damaged: each reader raises one error with the file's name."""

import ast
import json
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vla_rl.envs.driving.scores.bench2drive import RouteRecord
from vla_rl.envs.driving.scores.leaderboard_files import (
    read_first_junctions,
    read_records,
    read_rides,
    read_route_ids,
    read_scenario_types,
)
from vla_rl.envs.driving.scores.navsim import read_recorded, read_two_stages
from vla_rl.envs.driving.scores.scene_files import load_scene, read_plans, save_scene
from vla_rl.envs.driving.world import draw_world
from vla_rl.envs.libero.task_files import check_goal_file, read_init_states, read_instruction

PACKAGE = Path(__file__).parents[2] / "vla_rl"

READERS = {
    "envs/driving/scores/leaderboard_files.py": {
        *(
            "read_route_ids",
            "read_scenario_types",
            "read_first_junctions",
            "read_rides",
            "read_records",
        ),
    },
    "envs/driving/scores/navsim.py": {"read_two_stages"},
    "envs/driving/scores/scene_files.py": {"read_arrays", "read_plans"},
    "envs/libero/task_files.py": {"_read_lines", "_read_npz", "_read_pickled"},
}
"""Functions that read a file of another program; `DAMAGED` has a file for each of them."""

OTHERS = {
    "envs/bench2drive/carla_side/vla_rl_agent.py": {"setup"},  # our own configuration
    "envs/bench2drive/carla_side/vla_rl_first_junctions.py": {"main", "make_planner"},
    "envs/bench2drive/carla_side/vla_rl_route_server.py": {"record"},  # beside the leaderboard
    "envs/bench2drive/carla_side/vla_rl_wire.py": {"decode_message"},  # tested with its peer
    "envs/driving/closed_loop.py": {"set_state"},  # a state that get_state returned
    "envs/driving/one_decision.py": {"set_state"},
    "envs/navsim/export_scenes.py": {"load_split"},  # navsim's own files, in its environment
    "envs/image_env.py": {"set_state"},
    "envs/toy.py": {"set_state"},
}
"""Functions that read something else, or files of ours on another machine."""

_READING = {"load", "loads", "parse", "ZipFile", "safe_load", "read_text", "read_bytes"}
_OF = {"np", "json", "ElementTree", "zipfile", "yaml", "pickle"}


def readers_in(source: str) -> set[str]:
    """Return the innermost functions that call a reader of a file format, or read a file."""
    found = set()
    for function in [
        each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef)
    ]:
        for call in ast.walk(function):
            if not isinstance(call, ast.Call):
                continue
            if ast.unparse(call.func) == "read_npz":
                found.add(function.name)
            if not isinstance(call.func, ast.Attribute):
                continue
            owner, name = ast.unparse(call.func.value), call.func.attr
            if name in _READING and (owner in _OF or name in ("read_text", "read_bytes")):
                found.add(function.name)
    return found


def test_every_reader_of_a_foreign_file_is_in_the_list() -> None:
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in sorted((PACKAGE / "envs").rglob("*.py"))
        if (names := readers_in(path.read_text()))
    }
    listed = {**READERS, **OTHERS}
    assert {name: names - listed.get(name, set()) for name, names in found.items()} == {
        name: set() for name in found
    }
    assert set(READERS) <= set(found)
    assert readers_in("def f(p):\n    return json.loads(p.read_text())\n") == {"f"}


def _write_plans(path: Path) -> None:
    ahead = np.zeros((2, 8, 3))
    ahead[..., 0] = np.arange(8)
    np.savez(path, tokens=np.array(["a", "b"]), waypoints=ahead, interval_s=0.5)


def _write_recorded(path: Path) -> None:
    save_scene(path, draw_world(0).scene())
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    np.savez(
        path,
        **arrays,
        token=np.array("a"),
        log_name=np.array("log"),
        time_s=np.array(1.0),
        is_synthetic=np.array(False),
        command=np.array([0.0, 1.0, 0.0, 0.0]),
        cameras=np.array(["cam_f0"]),
        pictures=np.array(["a.jpg"]),
    )


def _write_pickled(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", pickle.dumps(np.arange(6.0).reshape(2, 3), protocol=2))


def _write_json(value: object) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps(value))


def _write_text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


ROUTES = '<routes><route id="3" town="a"><scenarios><scenario type="Accident"/></scenarios></route></routes>'
RECORDS = {
    "_checkpoint": {
        "records": [
            {
                "route_id": "RouteScenario_1_rep0",
                "status": "Completed",
                "scores": {"score_route": 100.0, "score_composed": 90.0},
                "infractions": {"outside_route_lanes": ["about 7 meters (10.0% of the route)"]},
            }
        ]
    }
}
RIDE = {
    str(tick): {
        name: [0.0, 1.0, 0.0]
        for name in ("acceleration", "forward_vector", "right_vector", "angular_velocity")
    }
    for tick in range(6)
}
GOAL = (
    "(define (problem A) (:domain robosuite) (:language go)\n(:objects a - b)\n"
    "(:goal (And (On a a))))"
)


def _ride_of(path: Path) -> object:
    return read_rides([RouteRecord("1", "Perfect", 100.0, save_name="ride")], path.parents[1])


DAMAGED: dict[str, tuple[str, Callable[[Path], object], Callable[[Path], object]]] = {
    "routes": ("routes.xml", _write_text(ROUTES), read_route_ids),
    "scenarios": ("routes.xml", _write_text(ROUTES), read_scenario_types),
    "junctions": (
        "junctions.json",
        _write_json({"format": 1, "routes": {"3": {"point": 1, "num_points": 4}}}),
        read_first_junctions,
    ),
    "results": ("results.json", _write_json(RECORDS), lambda path: read_records([path])),
    "ride": ("ride/metric_info.json", _write_json(RIDE), _ride_of),
    "plans": ("plans.npz", _write_plans, read_plans),
    "scene": ("scene.npz", lambda path: save_scene(path, draw_world(0).scene()), load_scene),
    "recorded": ("recorded.npz", _write_recorded, read_recorded),
    "stages": (
        "two_stages.json",
        _write_json([["a", "b", [["c", "d"]]]]),
        lambda path: read_two_stages(path.parent),
    ),
    "goal": ("mine.bddl", _write_text(GOAL), lambda path: check_goal_file(path, {"on"})),
    "instruction": ("mine.bddl", _write_text(GOAL), read_instruction),
    "states, npz": (
        "states.npz",
        lambda path: np.savez(path, states=np.arange(6.0).reshape(2, 3)),
        read_init_states,
    ),
    "states, pickled": ("states.pruned_init", _write_pickled, read_init_states),
}


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """Return the bytes with some of them changed, left out, or put twice."""
    content = bytearray(whole)
    kind, offset = rng.randrange(4), rng.randrange(len(whole))
    if kind == 0:
        del content[offset:]
    elif kind == 1:
        content[offset : offset + rng.randrange(1, 9)] = b""
    else:
        for _ in range(rng.randrange(1, 4)):
            offset = rng.randrange(len(content))
            content[offset] = rng.choice(
                (content[offset] ^ (1 << rng.randrange(8)), rng.randrange(256))
            )
    return bytes(content)


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_named_in_one_error(tmp_path: Path, kind: str) -> None:
    name, write, read = DAMAGED[kind]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    write(path)
    read(path)  # whole, it is read
    whole, rng = path.read_bytes(), random.Random(7)
    cases = [b"", b"{}", b"[]", b"[" * 100_000, b"\xff\xfe", b"PK\x03\x04", b"null"]
    cases += [damaged(whole, rng) for _ in range(60)]
    for content in cases:
        path.write_bytes(content)
        try:
            read(path)
        except ValueError as error:
            assert path.name in str(error)  # noqa: PT017
