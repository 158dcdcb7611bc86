"""Contents of an asset file as plain frozen data: geoms, sites, joints, parts, and a whole item
with its file path.

Lengths are metres, angles radians, quaternions (w, x, y, z), colours "#rrggbb".
"""

from dataclasses import dataclass, replace
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
