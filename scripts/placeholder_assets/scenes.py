"""The five rooms: a floor, walls and a table, with the names that LIBERO moves, resizes and
attaches its regions to.
"""

import math
from dataclasses import dataclass

from scripts.placeholder_assets.shapes import (
    Geom,
    Geoms,
    Material,
    Part,
    Quaternion,
    Site,
    Vector,
    about_x,
    about_z,
    compose,
    paint,
    touch,
    turned,
)

_FLOOR = Material("floorplane", "light-gray-floor-tile", (2.0, 2.0), 0.1, 0.0, "2d", "texplane")
_WALL = Material("walls_mat", "light-gray-plaster", (2.0, 2.0), 0.1, 0.0, "2d", "tex-wall")
_TABLE = Material("table_texture", "table", (1.0, 1.0), 0.2, 0.2, "cube", "tex-table")
_WOOD = Material("wood", "wood", (1.0, 1.0), 0.2, 0.2)
_HALF_HEIGHT = 1.5


@dataclass(frozen=True)
class Room:
    """One scene file."""

    name: str
    geoms: Geoms
    """Geoms that belong to the world itself."""

    parts: tuple[Part, ...]
    materials: tuple[Material, ...] = (_FLOOR, _WALL, _TABLE, _WOOD)

    @property
    def file(self) -> str:
        """Path below the asset folder, with suffix."""
        return f"scenes/{self.name}.xml"


def rooms() -> tuple[Room, ...]:
    """Return all rooms.

    The floor is a geom of the world or a body with one geom, where LIBERO's code looks for it.
    """
    floor = Geom("plane", (3.0, 3.0, 0.125), color="#ffffff", material="floorplane", name="floor")
    return (
        Room("libero_floor_base_style", (*_walls(), *_skirting()), (Part("floor", (floor,)),)),
        Room("libero_tabletop_base_style", (floor, *_walls(), *_skirting()), (_work_table(),)),
        Room(
            "libero_kitchen_tabletop_base_style",
            (floor, *_walls(), *_skirting(), *_counter()),
            (_work_table(),),
        ),
        Room(
            "libero_living_room_tabletop_base_style",
            (*_walls(), *_skirting(), *_sofa()),
            (Part("floor", (floor,)), _low_table()),
        ),
        Room(
            "libero_study_base_style", (floor, *_walls(), *_skirting(), *_bookshelf()), (_desk(),)
        ),
    )


def _walls() -> Geoms:
    """Return six walls, for drawing only: around a room of 5 by 6 m with two cut corners behind the
    robot.
    """
    upright = compose(about_z(math.pi / 2), about_x(math.pi / 2))

    def wall(half_width: float, x: float, y: float, turn: float) -> Geom:
        quat = compose(about_z(turn), upright)
        return Geom(
            "box",
            (half_width, _HALF_HEIGHT, 0.01),
            (x, y, _HALF_HEIGHT),
            quat,
            "#ffffff",
            "walls_mat",
        )

    return (
        wall(1.50, -2.00, 0.0, 0.0),
        wall(1.06, -1.25, 2.25, -math.pi / 4),
        wall(1.06, -1.25, -2.25, math.pi / 4),
        wall(1.75, 1.25, 3.0, math.pi / 2),
        wall(1.75, 1.25, -3.0, math.pi / 2),
        wall(3.00, 3.00, 0.0, 0.0),
    )


def _skirting() -> Geoms:
    """A white board along the foot of the wall that the camera sees."""
    return (
        paint((0.03, 3.0, 0.12), (-1.98, 0.0, 0.06), "#f2f1ec"),
        paint((0.03, 2.12, 0.12), (-1.24, 2.24, 0.06), "#f2f1ec", about_z(-math.pi / 4)),
        paint((0.03, 2.12, 0.12), (-1.24, -2.24, 0.06), "#f2f1ec", about_z(math.pi / 4)),
    )


def _work_table() -> Part:
    """Return the work table; LIBERO moves it, and sets its size and that of its legs."""
    half = (0.4, 0.4, 0.4)
    legs = tuple(
        Geom("cylinder", (0.05, 0.1), color="#c6b4a2", name=f"table_leg{i}_visual")
        for i in range(1, 5)
    )
    geoms = (
        Geom("box", half, name="table_collision"),
        Geom("box", half, color="#ffffff", material="table_texture", name="table_visual"),
        *legs,
    )
    return Part(
        "table",
        geoms,
        (Site("table_top", (0.0, 0.0, 0.4), (0.001, 0.001, 0.001), type="sphere"),),
        pos=(0.0, 0.0, 0.4),
    )


def _table(
    name: str, size: Vector, center: tuple[float, float], top: float, leg: str, tint: str
) -> Part:
    """A table of LIBERO's fixed size with four legs."""
    x, y, thick = size
    cx, cy = center
    at = (cx, cy, top - thick / 2)
    legs = tuple(
        paint(
            (0.05, 0.05, top - thick),
            (cx + i * (x / 2 - 0.06), cy + j * (y / 2 - 0.06), (top - thick) / 2),
            leg,
        )
        for i in (-1, 1)
        for j in (-1, 1)
    )
    return Part(name, (touch(size, at), paint(size, at, tint, material="table_texture"), *legs))


def _low_table() -> Part:
    return _table("living_room_table", (0.70, 1.60, 0.030), (0.0, 0.0), 0.43, "#4a3222", "#624c44")


def _desk() -> Part:
    return _table("study_table", (1.00, 1.20, 0.050), (-0.2, 0.0), 0.867, "#3a3a3c", "#ac8857")


def _counter() -> Geoms:
    """Cupboards along the far wall of the kitchen."""
    return (
        paint((0.50, 2.60, 0.86), (-1.70, 0.0, 0.43), "#e9e6dc", material="wood"),
        paint((0.54, 2.64, 0.04), (-1.70, 0.0, 0.88), "#5b5d61"),
        *(paint((0.02, 0.012, 0.78), (-1.445, y, 0.43), "#b9b5a8") for y in (-0.65, 0.0, 0.65)),
    )


def _sofa() -> Geoms:
    """A sofa behind the robot in the living room, and a rug."""
    cloth, dark = "#6f7f8c", "#5d6b77"
    return (
        paint((0.70, 1.90, 0.22), (-1.45, 0.0, 0.29), cloth),
        paint((0.22, 1.90, 0.50), (-1.75, 0.0, 0.55), dark),
        paint((0.70, 0.20, 0.34), (-1.45, 1.00, 0.40), dark),
        paint((0.70, 0.20, 0.34), (-1.45, -1.00, 0.40), dark),
        turned([(1.30, 0.006), (0, 0.006)], "#b4533c", 24),
        turned([(1.10, 0.010), (0, 0.010)], "#d9c7a6", 24),
    )


def _bookshelf() -> Geoms:
    """Shelves with books on the far wall of the study."""
    colors = ("#8c2f2f", "#2f5d8c", "#3f7d4f", "#c9a24a", "#5b4b7a", "#2f7d7a", "#a9552f")
    boards = tuple(
        paint((0.30, 1.80, 0.03), (-1.80, 0.0, z), "#a9713f", material="wood")
        for z in (0.40, 0.85, 1.30)
    )
    sides = tuple(
        paint((0.30, 0.03, 1.30), (-1.80, y, 0.66), "#a9713f", material="wood") for y in (-0.9, 0.9)
    )
    books = tuple(
        paint(
            (0.20, 0.10, 0.24 + 0.03 * ((3 * i + row) % 4)),
            (-1.78, -0.70 + 0.135 * i, z + 0.16),
            colors[(2 * i + row) % 7],
        )
        for row, z in enumerate((0.40, 0.85))
        for i in range(10)
        if (i + row) % 5
    )
    return (*boards, *sides, *books)


CAMERAS: dict[str, tuple[Vector, Quaternion]] = {
    "frontview": ((1.0, 0.0, 1.45), (0.56, 0.43, 0.43, 0.56)),
    "birdview": ((-0.2, 0.0, 3.0), (0.7071, 0.0, 0.0, 0.7071)),
    "agentview": ((0.5, 0.0, 1.35), (0.653, 0.271, 0.271, 0.653)),
    "sideview": ((-0.06, 1.28, 1.49), (0.0099, 0.0069, 0.5912, 0.8064)),
}
"""Camera views by name; LIBERO moves agentview for each room."""

LIGHTS: tuple[Vector, ...] = ((1.0, 1.0, 4.0), (-3.0, -3.0, 4.0))
"""Positions of LIBERO's two lamps."""
