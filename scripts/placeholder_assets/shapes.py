"""Contents of an asset file as plain frozen data, with the building blocks of its shapes.

Lengths are metres, angles radians, quaternions (w, x, y, z), colours "#rrggbb". All items stand
upright on z. Two rules keep them graspable and fast:

- Collision shapes are boxes only. Cylinders slip out of a gripper with flat pads; an octagonal
  prism does not.
- Each round visible shape is one turned mesh, with a twentieth of the triangles of MuJoCo's own
  cylinders.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeAlias

Vector: TypeAlias = tuple[float, float, float]
Quaternion: TypeAlias = tuple[float, float, float, float]

UPRIGHT: Quaternion = (1.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Surface:
    """A triangle mesh in whole tenths of a millimetre, for drawing only.

    Collision shapes are always boxes.
    """

    vertices: tuple[tuple[int, int, int], ...]
    faces: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Geom:
    """One shape of a part: either solid (collides, never drawn) or painted (drawn, without mass,
    never collides).
    """

    type: str
    """MuJoCo's type: box, cylinder or mesh."""

    size: tuple[float, ...] = ()
    """Half extents of a box, radius and half height of a cylinder; empty for a mesh."""

    pos: Vector = (0.0, 0.0, 0.0)
    quat: Quaternion = UPRIGHT
    color: str = ""
    """Colour of a painted geom; a solid one has none."""

    material: str = ""
    """Name of one of the item's materials, which tints it with `color`."""

    surface: Surface | None = None
    name: str = ""
    density: float = 1.0
    """Weight of a solid geom relative to the others of its part."""

    @property
    def is_solid(self) -> bool:
        """Whether it collides; otherwise it is drawn."""
        return not self.color


@dataclass(frozen=True)
class Site:
    """A marked place that LIBERO's goals refer to; invisible unless it has a colour."""

    name: str
    pos: Vector
    size: tuple[float, ...]
    quat: Quaternion = UPRIGHT
    type: str = "box"
    color: str = ""


@dataclass(frozen=True)
class Joint:
    """Motion of a part relative to its parent."""

    name: str
    type: str
    axis: Vector
    range: tuple[float, float]
    damping: float


@dataclass(frozen=True)
class Part:
    """One body: its geoms, and its child parts, in an order on which LIBERO's code depends."""

    name: str
    geoms: tuple[Geom, ...] = ()
    sites: tuple[Site, ...] = ()
    parts: "tuple[Part, ...]" = ()
    joint: Joint | None = None
    pos: Vector = (0.0, 0.0, 0.0)
    quat: Quaternion = UPRIGHT
    mass_kg: float = 0.0
    """Mass that is spread over the solid geoms by volume; 0 for parts that are fixed to the
    table."""

    inertia: float = 0.0
    """Inertia of a jointed part about each axis (kg m^2); 0 computes it from the solid geoms."""


@dataclass(frozen=True)
class Material:
    """A look that a plain colour cannot give."""

    name: str
    texture: str = ""
    """File below `textures/`, without suffix; empty for a plain surface."""

    repeat: tuple[float, float] = (1.0, 1.0)
    specular: float = 0.3
    shininess: float = 0.3
    projection: str = "cube"
    """Mapping of the texture: "cube" on every side of a box, "2d" on a plane."""

    texture_name: str = ""
    """LIBERO's name of the texture, if its code looks for it."""


@dataclass(frozen=True)
class Reach:
    """Distances that an item reaches from its origin, as LIBERO's placement counts them (not
    measured).
    """

    below: float
    above: float
    around: float
    site_size: float = 0.005


@dataclass(frozen=True)
class Item:
    """One asset file."""

    file: str
    """Path below the asset folder, with suffix."""

    root: Part
    reach: Reach
    materials: tuple[Material, ...] = ()
    up: Literal["y", "z"] = "z"
    """Axis of its own frame that points up when it stands; LIBERO's initial states rotate it
    accordingly."""

    @property
    def name(self) -> str:
        """LIBERO's name of the item."""
        return self.file.rsplit("/", 1)[-1].removesuffix(".xml")


def solid(geom: Geom) -> Geom:
    """Return the same shape as a collision shape."""
    return replace(geom, color="", material="")


Geoms: TypeAlias = tuple[Geom, ...]
Profile: TypeAlias = Sequence[tuple[float, float]]

_UNIT_M = 1e-4
_GAP_M = 0.0004
"""Difference in length of the diagonal boxes of a prism (m), so that it stands on two of its four
boxes."""


def about_x(angle: float) -> Quaternion:
    """Return a rotation about x (rad)."""
    return (math.cos(angle / 2), math.sin(angle / 2), 0.0, 0.0)


def about_y(angle: float) -> Quaternion:
    """Return a rotation about y (rad)."""
    return (math.cos(angle / 2), 0.0, math.sin(angle / 2), 0.0)


def about_z(angle: float) -> Quaternion:
    """Return a rotation about z (rad)."""
    return (math.cos(angle / 2), 0.0, 0.0, math.sin(angle / 2))


def compose(a: Quaternion, b: Quaternion) -> Quaternion:
    """Return the rotation `b` within the frame of the rotation `a`."""
    return (
        a[0] * b[0] - a[1] * b[1] - a[2] * b[2] - a[3] * b[3],
        a[0] * b[1] + a[1] * b[0] + a[2] * b[3] - a[3] * b[2],
        a[0] * b[2] - a[1] * b[3] + a[2] * b[0] + a[3] * b[1],
        a[0] * b[3] + a[1] * b[2] - a[2] * b[1] + a[3] * b[0],
    )


def rotate(quat: Quaternion, v: Vector) -> Vector:
    """Rotate `v` by `quat`."""
    w, x, y, z = quat
    _, rx, ry, rz = compose(compose(quat, (0.0, *v)), (w, -x, -y, -z))
    return (rx, ry, rz)


def moved(geoms: Iterable[Geom], to: Vector = (0.0, 0.0, 0.0), turn: Quaternion = UPRIGHT) -> Geoms:
    """Rotate the geoms about the origin, then shift them."""
    positioned = []
    for geom in geoms:
        x, y, z = rotate(turn, geom.pos)
        pos = (x + to[0], y + to[1], z + to[2])
        positioned.append(replace(geom, pos=pos, quat=compose(turn, geom.quat)))
    return tuple(positioned)


def along_y(geoms: Iterable[Geom]) -> Geoms:
    """Rotate the geoms so that their top points to y, as LIBERO's cans, bottles and cartons lie in
    their own frame.
    """
    return moved(geoms, turn=about_x(-math.pi / 2))


def touch(
    size: Vector, pos: Vector = (0.0, 0.0, 0.0), quat: Quaternion = UPRIGHT, density: float = 1.0
) -> Geom:
    """Return a collision box; `size` is its full extent."""
    return Geom("box", (size[0] / 2, size[1] / 2, size[2] / 2), pos, quat, density=density)


def paint(
    size: Vector,
    pos: Vector,
    color: str,
    quat: Quaternion = UPRIGHT,
    material: str = "",
    name: str = "",
) -> Geom:
    """Return a painted box; `size` is its full extent."""
    return Geom(
        "box", (size[0] / 2, size[1] / 2, size[2] / 2), pos, quat, color, material, name=name
    )


def block(
    size: Vector, pos: Vector, color: str, quat: Quaternion = UPRIGHT, material: str = ""
) -> Geoms:
    """Return a box that is both a collision shape and painted."""
    seen = paint(size, pos, color, quat, material)
    return (seen, solid(seen))


def octagon(width: float, bottom: float, top: float) -> Geoms:
    """Return an eight-sided collision prism, `width` from flat to flat: four boxes through its
    axis.
    """
    narrow = width * math.tan(math.pi / 8)
    boxes = []
    for i in range(4):
        gap = _GAP_M * (i % 2)
        size = (width, narrow, top - bottom - 2 * gap)
        boxes.append(touch(size, (0.0, 0.0, (bottom + top) / 2), about_z(i * math.pi / 4)))
    return tuple(boxes)


def ring(
    bottom: tuple[float, float], top: tuple[float, float], thickness: float, count: int
) -> Geoms:
    """Return a wall of `count` collision panels, from radius and height (r, z) at the bottom to
    those at the top.

    The radii are those of the outer face, at the middle of a panel.
    """
    dr, dz = top[0] - bottom[0], top[1] - bottom[1]
    length, tilt = math.hypot(dr, dz), math.atan2(dr, dz)
    radius = (bottom[0] + top[0]) / 2 - math.cos(tilt) * thickness / 2
    height = (bottom[1] + top[1]) / 2 + math.sin(tilt) * thickness / 2
    width = 2 * max(bottom[0], top[0]) * math.tan(math.pi / count)
    panels = []
    for i in range(count):
        angle = 2 * math.pi * i / count
        pos = (radius * math.cos(angle), radius * math.sin(angle), height)
        panels.append(
            touch((thickness, width, length), pos, compose(about_z(angle), about_y(tilt)))
        )
    return tuple(panels)


def turned(profile: Profile, color: str, segments: int = 16, material: str = "") -> Geom:
    """Return a painted surface of revolution about z.

    Args:
        profile: (radius, height) from the axis below, around the outside, to the axis above or
            inside.
        color: its colour.
        segments: number of flat sides around it.
    """
    vertices: list[tuple[int, int, int]] = []
    rows: list[list[int]] = []
    for radius, height in profile:
        start, z = len(vertices), _whole(height)
        if radius == 0:
            vertices.append((0, 0, z))
            rows.append([start] * segments)
            continue
        for j in range(segments):
            angle = 2 * math.pi * j / segments
            vertices.append((_whole(radius * math.cos(angle)), _whole(radius * math.sin(angle)), z))
        rows.append(list(range(start, start + segments)))
    faces = []
    for low, high in pairwise(rows):
        for j in range(segments):
            a, b = low[j], low[(j + 1) % segments]
            c, d = high[(j + 1) % segments], high[j]
            faces += [face for face in ((a, b, c), (a, c, d)) if len(set(face)) == 3]
    return Geom(
        "mesh", color=color, material=material, surface=Surface(tuple(vertices), tuple(faces))
    )


def prism(outline: Profile, depth: float, color: str, material: str = "") -> Geom:
    """Return a painted slab: a convex outline in (x, z), counterclockwise seen from -y, `depth`
    thick along y.
    """
    n, y = len(outline), _whole(depth / 2)
    front = [(_whole(x), -y, _whole(z)) for x, z in outline]
    back = [(x, -front_y, z) for x, front_y, z in front]
    faces = [(0, i, i + 1) for i in range(1, n - 1)]
    faces += [(n, n + i + 1, n + i) for i in range(1, n - 1)]
    for i in range(n):
        j = (i + 1) % n
        faces += [(i, i + n, j + n), (i, j + n, j)]
    return Geom(
        "mesh", color=color, material=material, surface=Surface(tuple(front + back), tuple(faces))
    )


def _whole(length: float) -> int:
    return round(length / _UNIT_M)
