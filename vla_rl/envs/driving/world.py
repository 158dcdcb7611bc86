"""A driving scene from an integer: roads, traffic, signals, and what was recorded in them.

Training and held-out scenes are drawn from different keys, so that no number of either gives a
scene of the other.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, get_args

import numpy as np

from vla_rl.envs.driving.layouts import LAYOUTS
from vla_rl.envs.driving.paths import Floats
from vla_rl.envs.driving.roads import Roads
from vla_rl.envs.driving.scores import PACIFICA, Map, RedLights, Scene, Tracks
from vla_rl.envs.driving.scores.vehicle import AX, NUM_STEPS, STATE_SIZE, STEER, VX, YAW_RATE
from vla_rl.envs.driving.traffic import CONE, STEP_S, Traffic, drawn_traffic

Split = Literal["train", "held_out"]

NUM_SCENES: Final = 1 << 31
"""Scenes of each split."""

PAST: Final = 15
"""Recorded steps before the scene starts: 1.5 s."""

FUTURE: Final = NUM_STEPS + 10
_KEYS: Final = {"train": 71, "held_out": 72}


@dataclass(frozen=True)
class Signal:
    """A signal of the car's approach: red or green at first, the other one from `turns_at_s` on."""

    is_red_first: bool
    turns_at_s: float

    def is_red(self, time_s: float) -> bool:
        """Return if the car's light is red."""
        return self.is_red_first == (time_s < self.turns_at_s)


@dataclass
class World:
    """Roads and their users at one moment.

    Attributes:
        kind: name of the layout.
        light: brightness of the pictures.
        start: [11], the car's state at 0 s, as the scores lay it out.
        recording: [66, N, 3], poses of all at 10 Hz from -1.5 s to 5.0 s, the car driven by IDM.
        speeds: [66, N], of the same.
    """

    kind: str
    light: float
    roads: Roads
    traffic: Traffic
    signal: Signal
    start: Floats
    recording: Floats
    speeds: Floats

    @cached_property
    def map(self) -> Map:
        """The polygons, as the scores read them."""
        return self.roads.as_map()

    @cached_property
    def tracks(self) -> Tracks:
        """The recorded future of all others."""
        poses = self.recording[PAST:, 1:].transpose(1, 0, 2)
        return Tracks(
            poses=np.ascontiguousarray(poses),
            sizes=self.traffic.sizes()[1:, :2],
            speeds=self.speeds[PAST, 1:],
            is_agent=self.traffic.kinds[1:] != CONE,
        )

    @cached_property
    def red_lights(self) -> RedLights:
        """The connector of the route while its light is red."""
        if self.roads.signal_area is None:
            return RedLights()
        red = [self.signal.is_red(step * STEP_S) for step in range(NUM_STEPS + 1)]
        return RedLights((self.roads.signal_area,), np.array([red]))

    def scene(self, reference: Floats | None = None) -> Scene:
        """Return the scene as the scores read it, without or with the reference's poses."""
        states = states_of(self.recording[:, 0], self.speeds[:, 0])
        relative = _in_frame_of(states[PAST, :3], states[PAST + 5 : PAST + 41 : 5, :3])
        return Scene(
            start=self.start,
            map=self.map,
            centre_line=self.roads.route,
            tracks=self.tracks,
            red_lights=self.red_lights,
            reference=reference,
            history=states[:PAST],
            human=relative,
        )


def draw_world(number: int, split: Split = "train", kind: str | None = None) -> World:
    """Draw scene `number` of a split.

    Args:
        number: 0 to 2**31 - 1.
        kind: name of a layout; None: drawn.

    Raises: ValueError for another number, split or kind.
    """
    if not 0 <= number < NUM_SCENES:
        raise ValueError(f"the scene is {number}, expected 0 to {NUM_SCENES - 1}.")
    if split not in get_args(Split):
        raise ValueError(f"the split is {split!r}, expected {' or '.join(get_args(Split))}.")
    if kind is not None and kind not in LAYOUTS:
        raise ValueError(f"the kind is {kind!r}, expected one of {', '.join(LAYOUTS)}.")
    rng = np.random.default_rng((_KEYS[split], number))
    drawn = str(rng.choice(list(LAYOUTS)))
    roads = LAYOUTS[kind or drawn](rng)
    traffic = drawn_traffic(roads, rng)
    signal = Signal(bool(rng.random() < 0.6), float(rng.uniform(0.5, 9.0)))
    light = float(rng.uniform(0.6, 1.1))
    poses, speeds = [], []
    for step in range(-PAST, FUTURE + 1):
        if step == 0:
            now = traffic.copy()
        poses.append(traffic.poses())
        speeds.append(traffic.speeds.copy())
        has_signal, red = roads.stop is not None, signal.is_red(step * STEP_S)
        traffic.step(poses[-1], speeds[-1], has_signal and red, has_signal and not red)
    now.speeds = speeds[PAST].copy()
    recording, all_speeds = np.array(poses), np.array(speeds)
    start = states_of(recording[:, 0], all_speeds[:, 0])[PAST]
    return World(kind or drawn, light, roads, now, signal, start, recording, all_speeds)


def states_of(centres: Floats, speeds: Floats) -> Floats:
    """Return the states [T, 11] of a car whose box moves along `centres` [T, 3] at 10 Hz."""
    states = np.zeros((len(centres), STATE_SIZE))
    headings = np.unwrap(centres[:, 2])
    back = PACIFICA.rear_axle_to_centre * np.stack([np.cos(headings), np.sin(headings)], -1)
    states[:, :2], states[:, 2] = centres[:, :2] - back, headings
    states[:, VX] = speeds
    states[:, AX] = np.gradient(speeds, STEP_S)
    states[:, YAW_RATE] = np.gradient(headings, STEP_S)
    moving = np.maximum(speeds, 0.5)
    states[:, STEER] = np.arctan(PACIFICA.wheel_base * states[:, YAW_RATE] / moving)
    return states


def _in_frame_of(origin: Floats, poses: Floats) -> Floats:
    offset = poses - origin
    cos, sin = np.cos(origin[2]), np.sin(origin[2])
    x = cos * offset[:, 0] + sin * offset[:, 1]
    y = cos * offset[:, 1] - sin * offset[:, 0]
    return np.stack([x, y, offset[:, 2]], -1)
