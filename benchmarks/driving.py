"""Speed, memory and exactness of the driving world and its scores: `python -m benchmarks.driving`.

The last line is JSON: camera_steps_per_s, worker_mb, scored_per_s, batch_vs_single_max_diff,
rigid_motion_max_diff, bicycle_vs_scalar_max_diff. Rates are per second of one core's CPU time, and
depend on the core. Two ratios do not: camera_steps_vs_gym, over steps of gymnasium's Reacher-v5 with
an image of the same size, and scored_vs_single, plans scored in batches over plans scored one at a
time, both measured in turn.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Final

import gymnasium
import numpy as np

from benchmarks.interleaved import medians_of, ratio_of, sample_in_turn
from vla_rl.envs.driving.closed_loop import ClosedLoopDrivingEnv
from vla_rl.envs.driving.planner import best_proposal
from vla_rl.envs.driving.scores import Map, PdmScores, RedLights, Scene, Tracks, score_waypoints
from vla_rl.envs.driving.scores.motion import Car, bicycle_step, step_bicycle
from vla_rl.envs.driving.scores.scene import AX, HEADING, STEER, VX, YAW_RATE, X, Y
from vla_rl.envs.driving.world import draw_world
from vla_rl.envs.mujoco.loading import choose_graphics

NUM_SCENES: Final = 12
BATCH: Final = 64
BATCH_OF_ONE: Final = 4
"""Plans of each scene that are scored one at a time."""

NUM_STEPS: Final = 200
NUM_GYM_STEPS: Final = 60
ROUNDS: Final = 3
IMAGE_SIZE: Final = 128


def camera_steps_per_s() -> float:
    """Measure closed-loop steps: a decision of 0.5 s, 10 control steps, traffic, a 128 px image."""
    env = ClosedLoopDrivingEnv(image_size=IMAGE_SIZE)
    waypoints = np.tile(np.array([-0.2, 0.0, 0.0], np.float32), (8, 1))
    spent, steps, number = 0.0, 0, 0
    while steps < NUM_STEPS:
        env.reset(options={"init_state_id": number})
        number, over = number + 1, False
        began = time.process_time()
        while not over:
            _, _, terminated, truncated, _ = env.step(waypoints)
            over, steps = terminated or truncated, steps + 1
        spent += time.process_time() - began
    return steps / spent


def gym_steps_per_s() -> float:
    """Measure steps of gymnasium's own environment of a two-jointed arm, with an image of each."""
    choose_graphics()
    env = gymnasium.make("Reacher-v5", render_mode="rgb_array", width=IMAGE_SIZE, height=IMAGE_SIZE)
    env.reset(seed=0)
    env.render()  # which opens OpenGL
    action = np.zeros(2, np.float32)
    began = time.process_time()
    for _ in range(NUM_GYM_STEPS):
        env.step(action)
        env.render()
    spent = time.process_time() - began
    env.close()
    return NUM_GYM_STEPS / spent


def scored_per_s(drawn: list[Scene], batch: int) -> float:
    """Measure plans that are scored `batch` at a time."""
    began = time.process_time()
    for number, scene in enumerate(drawn):
        given = trajectories(number)[:BATCH_OF_ONE] if batch == 1 else trajectories(number)
        for row in range(0, len(given), batch):
            score_waypoints(scene, given[row : row + batch], "epdms_v2")
    num_scored = len(drawn) * (BATCH_OF_ONE if batch == 1 else BATCH)
    return num_scored / (time.process_time() - began)


def worker_mb() -> float:
    """Measure the private memory of a process that has driven one episode."""
    code = (
        "import numpy as np\n"
        "from vla_rl.envs.driving.closed_loop import ClosedLoopDrivingEnv\n"
        "env = ClosedLoopDrivingEnv()\n"
        "env.reset(seed=0)\n"
        "for _ in range(5): env.step(np.zeros((8, 3), np.float32))\n"
        "lines = open('/proc/self/smaps_rollup').read().splitlines()[1:]\n"
        "print(sum(int(line.split()[1]) for line in lines if line.startswith('Private')) / 1024)\n"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    return float(done.stdout)


def scenes() -> list[Scene]:
    """Draw scenes with the planner's reference."""
    worlds = [draw_world(number) for number in range(NUM_SCENES)]
    return [world.scene(best_proposal(world, "epdms_v2")[0]) for world in worlds]


def trajectories(seed: int) -> np.ndarray:
    """Draw trajectories: float64 [BATCH, 8, 3]."""
    rng = np.random.default_rng(seed)
    speed, turn = rng.uniform(0, 12, (BATCH, 1)), rng.normal(0, 0.1, (BATCH, 1))
    times = np.arange(1, 9) * 0.5
    heading = turn * times
    return np.stack([speed * times, speed * times * heading / 2, heading], -1)


def columns(scores: PdmScores) -> np.ndarray:
    """Return all sub-scores and the total: [BATCH, columns]."""
    return np.stack([*scores.sub.values(), scores.total], -1)


def moved(points: np.ndarray, angle: float, shift: np.ndarray) -> np.ndarray:
    """Turn and shift positions, and headings if there are three or more columns."""
    cos, sin = np.cos(angle), np.sin(angle)
    result = np.array(points, np.float64)
    result[..., 0] = cos * points[..., 0] - sin * points[..., 1] + shift[0]
    result[..., 1] = sin * points[..., 0] + cos * points[..., 1] + shift[1]
    if points.shape[-1] > 2:
        result[..., 2] = points[..., 2] + angle
    return result


def move_scene(scene: Scene, angle: float, shift: np.ndarray) -> Scene:
    """Return the scene turned and shifted."""

    def rings(given: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        return tuple(moved(ring, angle, shift) for ring in given)

    area, lights, tracks = scene.map, scene.red_lights, scene.tracks
    assert scene.reference is not None
    assert scene.history is not None
    return replace(
        scene,
        start=moved(scene.start, angle, shift),
        map=Map(rings(area.rings), area.layers, area.on_route),
        centre_line=moved(scene.centre_line, angle, shift),
        tracks=Tracks(
            moved(tracks.poses, angle, shift), tracks.sizes, tracks.speeds, tracks.is_agent
        ),
        red_lights=RedLights(rings(lights.rings), lights.is_red),
        reference=moved(scene.reference, angle, shift),
        history=moved(scene.history, angle, shift),
    )


def bicycle_difference() -> float:
    """Return the largest difference between the scalar and the batched bicycle in 40 steps."""
    rng = np.random.default_rng(1)
    car, state = Car(1.0, 2.0, 0.3, 6.0, 0.5, 0.1, 0.2), np.zeros((1, 11))
    indices = [X, Y, HEADING, VX, AX, STEER, YAW_RATE]
    state[0, indices] = car
    worst = 0.0
    for _ in range(40):
        accel, rate = rng.uniform(-3, 3), rng.uniform(-2, 2)
        car = step_bicycle(car, accel, rate, 0.1)
        state = bicycle_step(state, np.array([accel]), np.array([rate]))
        worst = max(worst, float(np.abs(state[0, indices] - car).max()))
    return worst


def main() -> int:
    """Measure, and print one line for each figure and the JSON."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    drawn = scenes()
    rates = sample_in_turn(
        {
            "camera": camera_steps_per_s,
            "gym": gym_steps_per_s,
            "batched": lambda: scored_per_s(drawn, BATCH),
            "single": lambda: scored_per_s(drawn, 1),
        },
        ROUNDS,
    )
    medians = medians_of(rates)
    result = {
        "camera_steps_per_s": round(medians["camera"]),
        "camera_steps_vs_gym": round(ratio_of(rates, "camera", "gym"), 2),
        "worker_mb": round(worker_mb(), 1),
        "scored_per_s": round(medians["batched"]),
        "scored_vs_single": round(ratio_of(rates, "batched", "single"), 1),
    }
    whole = [score_waypoints(one, trajectories(i), "epdms_v2") for i, one in enumerate(drawn)]
    single = moving = 0.0
    for number, (scene, batch) in enumerate(zip(drawn, whole, strict=True)):
        given, expected = trajectories(number), columns(batch)
        for row in range(0, BATCH, 16):
            alone = columns(score_waypoints(scene, given[row : row + 1], "epdms_v2"))
            single = max(single, float(np.abs(alone[0] - expected[row]).max()))
        moved_scene = move_scene(scene, 0.4 + number, np.array([40.0, -70.0]))
        other = columns(score_waypoints(moved_scene, given, "epdms_v2"))
        moving = max(moving, float(np.abs(other - expected).max()))
    result |= {
        "batch_vs_single_max_diff": single,
        "rigid_motion_max_diff": moving,
        "bicycle_vs_scalar_max_diff": bicycle_difference(),
    }
    for key, value in result.items():
        print(f"{key:28} {value}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
