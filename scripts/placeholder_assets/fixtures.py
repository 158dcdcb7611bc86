"""Fixtures on the tables: cabinets, stove, microwave, wine rack and desk caddy.

Names, order of the parts, joints and regions are those that LIBERO's goals and initial states rely
on. Fronts face -y. A fixture is welded to the world, so MuJoCo lets it collide with its own
drawers: about a millimetre is left between.
"""

import math
from dataclasses import replace

from scripts.placeholder_assets.shapes import (
    Geom,
    Geoms,
    Item,
    Joint,
    Material,
    Part,
    Reach,
    Site,
    about_x,
    about_z,
    block,
    octagon,
    paint,
    touch,
    turned,
)

_WOOD = Material("wood", "wood", (1.0, 1.0), specular=0.2)
_FIXED_REACH = Reach(0.045, 0.045, 0.045, site_size=0.05)
_BLACK, _STEEL = "#1d1d1f", "#b9bdc2"


def fixtures() -> tuple[Item, ...]:
    """Return all fixtures."""
    return (
        _cabinet("wooden_cabinet", "#3a332c", "#3c342e", "#676767"),
        _cabinet("white_cabinet", "#f0edee", "#ebe9ea", "#676767"),
        _stove(),
        _microwave(),
        _wine_rack(),
        _desk_caddy(),
    )


def _cabinet(name: str, shell: str, front: str, handle: str) -> Item:
    """Three drawers in a case of 255 by 191 by 218 mm, each opening 160 mm towards -y."""
    m = "wood"
    x, y = 0.0039, 0.0163
    case = (
        *block((0.0103, 0.1908, 0.2117), (-0.1122, y, 0.1143), shell, material=m),
        *block((0.0103, 0.1908, 0.2117), (0.1190, y, 0.1143), shell, material=m),
        *block((0.2382, 0.0046, 0.2117), (0.0021, 0.1094, 0.1143), shell, material=m),
        *block((0.2234, 0.1787, 0.0017), (x, 0.0187, 0.1494), shell, material=m),
        *block((0.2234, 0.1787, 0.0017), (x, 0.0187, 0.0793), shell, material=m),
        *block((0.2234, 0.1787, 0.0017), (x, 0.0187, 0.0093), shell, material=m),
        *block((0.2546, 0.1882, 0.0028), (x, 0.0158, 0.2216), shell, material=m),
        paint((0.2420, 0.1800, 0.0140), (x, 0.0200, 0.0000), "#2a2522"),
    )
    heights = {"top": 0.18563, "middle": 0.11690, "bottom": 0.04701}
    drawers = tuple(_drawer(level, z, front, handle) for level, z in heights.items())
    side = Site("top_side", (0.00354, 0.01567, 0.22152), (0.12534, 0.09438, 0.00147))
    base = Part("base", case, (side,), drawers)
    return Item(
        f"articulated_objects/{name}.xml", Part("object", parts=(base,)), _FIXED_REACH, (_WOOD,)
    )


def _drawer(level: str, height: float, front: str, handle: str) -> Part:
    """A drawer whose inside is 205 by 155 by 57 mm, with a bar of 89 mm to pull at."""
    z, m = height - 0.0021, "wood"
    geoms = (
        *block((0.2187, 0.0054, 0.0664), (0.0033, -0.0752, z - 0.0004), front, material=m),
        *block((0.2136, 0.0071, 0.0630), (0.0033, -0.0684, z), front, material=m),
        *block((0.2136, 0.0071, 0.0630), (0.0033, 0.0908, z), front, material=m),
        *block((0.0048, 0.1630, 0.0630), (-0.1019, 0.0111, z), front, material=m),
        *block((0.0048, 0.1630, 0.0630), (0.1089, 0.0111, z), front, material=m),
        *block((0.2139, 0.1619, 0.0080), (0.0035, 0.0105, z - 0.0284), front, material=m),
        *block((0.0889, 0.0154, 0.0163), (-0.0028, -0.1016, z + 0.0008), handle),
        *block((0.0101, 0.0211, 0.0110), (0.0292, -0.0835, z + 0.0008), handle),
        *block((0.0101, 0.0211, 0.0110), (-0.0356, -0.0835, z + 0.0008), handle),
    )
    region = Site(
        f"{level}_region",
        (0.00328, 0.01128, height),
        (0.02993, 0.07561, 0.10224),
        (0.70711, 0.0, 0.70711, 0.0),
    )
    joint = Joint(f"{level}_level", "slide", (0.0, 1.0, 0.0), (-0.16, 0.01), 50.0)
    return Part(f"cabinet_{level}", geoms, (region,), joint=joint, mass_kg=3.0, inertia=1.0)


def _stove() -> Item:
    """A plate of 190 mm with a burner, and beside it a knob whose ridge is thin enough to be
    gripped.
    """
    rings = tuple(
        turned([(r, 0.0250), (r, 0.0268), (r - 0.004, 0.0268), (r - 0.004, 0.0250)], "#4a4a4a", 20)
        for r in (0.030, 0.048, 0.066)
    )
    disc = replace(turned([(0.0700, 0.0252), (0, 0.0256)], "#787878", 20), name="burner")
    burner = Part(
        "burner",
        (
            paint((0.1900, 0.1900, 0.0400), (0.0, 0.0, 0.0), "#fdfbf8", name="base_vis"),
            Geom("box", (0.0950, 0.0950, 0.0200), name="base"),
            Geom("box", (0.0950, 0.0950, 0.0005), (0.0, 0.0, 0.0250), name="collision_burner"),
            paint((0.1860, 0.1860, 0.0040), (0.0, 0.0, 0.0220), "#fdfbf8"),
        ),
        (
            Site("cook_region", (0.0, 0.0, 0.0), (0.075, 0.075, 0.0025)),
            Site("burner", (0.0, 0.0, 0.0262), (0.0625, 0.0005), type="cylinder", color="#e60d0d"),
        ),
        (Part("burner_plate", (disc, *rings)),),
        pos=(0.15, 0.0, 0.0),
    )
    knob = Part(
        "button",
        (
            *octagon(0.0960, 0.0004, 0.0128),
            touch((0.0240, 0.0920, 0.0380), (0.0012, 0.0060, 0.0310)),
            turned([(0, 0.0), (0.0490, 0.0), (0.0470, 0.0130), (0, 0.0130)], "#1a1a1a", 20),
            paint((0.0240, 0.0920, 0.0370), (0.0012, 0.0060, 0.0315), _BLACK),
            paint((0.0050, 0.0300, 0.0006), (0.0012, 0.0330, 0.0502), "#f4f4f0"),
        ),
        joint=Joint("button", "hinge", (0.0, 0.0, 1.0), (-0.005, 2.1), 1.0),
        quat=about_z(math.pi / 2),
        mass_kg=3.0,
        inertia=1.0,
    )
    base = Part("base", parts=(burner, knob))
    return Item("articulated_objects/flat_stove.xml", Part("object", parts=(base,)), _FIXED_REACH)


def _microwave() -> Item:
    """An oven of 330 by 195 by 220 mm.

    Its door is hinged on the left and swings open by 120 degrees.
    """
    shell, inner = "#464646", "#4c4e50"
    case = (
        *block((0.3300, 0.1900, 0.0340), (0.0150, 0.0100, -0.0030), shell),
        *block((0.3300, 0.1900, 0.0200), (0.0150, 0.0100, 0.1900), shell),
        *block((0.0220, 0.1900, 0.1660), (-0.1390, 0.0100, 0.0970), shell),
        *block((0.0520, 0.1900, 0.1660), (0.1540, 0.0100, 0.0970), shell),
        *block((0.2560, 0.0080, 0.1660), (0.0000, 0.1010, 0.0970), inner),
        paint((0.0440, 0.0020, 0.1500), (0.1540, -0.0860, 0.1000), _BLACK),
        paint((0.0320, 0.0030, 0.0200), (0.1540, -0.0865, 0.1560), "#3f8f5a"),
        *(
            paint(
                (0.0080, 0.0030, 0.0080),
                (0.1430 + 0.0110 * (i % 3), -0.0865, 0.1240 - 0.0140 * (i // 3)),
                "#c9ced3",
            )
            for i in range(9)
        ),
        turned([(0.0700, 0.0146), (0, 0.0146)], "#c7d3d6", 20),
    )
    regions = (
        Site("top_side", (0.0, 0.01, 0.20), (0.12, 0.0835, 0.005)),
        Site("heating_region", (0.0, 0.01, 0.096), (0.12, 0.0835, 0.08)),
    )
    door = Part(
        "microdoorroot",
        (
            *block((0.2740, 0.0120, 0.1960), (0.1380, -0.0075, 0.0980), "#96928c"),
            paint((0.1960, 0.0130, 0.1200), (0.1280, -0.0075, 0.1000), "#34363a"),
            *block((0.0140, 0.0140, 0.1300), (0.2540, -0.0340, 0.1000), _STEEL),
            *block((0.0140, 0.0180, 0.0120), (0.2540, -0.0210, 0.1580), _STEEL),
            *block((0.0140, 0.0180, 0.0120), (0.2540, -0.0210, 0.0420), _STEEL),
        ),
        joint=Joint("microjoint", "hinge", (0.0, 0.0, 1.0), (-2.094, 0.0), 0.5),
        pos=(-0.1480, -0.0870, 0.0),
        mass_kg=0.5,
    )
    return Item(
        "articulated_objects/microwave.xml",
        Part("object", case, regions, (door,)),
        Reach(0.06, 0.06, 0.015, 0.05),
    )


def _wine_rack() -> Item:
    """Two shelves of 269 by 158 mm, tilted by 31 degrees on a post.

    The bottle lies on the upper one.
    """
    tilt, board, dark = about_x(math.radians(31.3)), "#e6bd92", "#551a08"
    geoms = (
        *block((0.2688, 0.1579, 0.0090), (0.0, -0.0061, 0.2512), board, tilt, "wood"),
        *block((0.2688, 0.1579, 0.0090), (0.0, -0.0427, 0.1273), board, tilt, "wood"),
        # the stoppers of LIBERO's own are clear as glass, so they are invisible here
        touch((0.2644, 0.0030, 0.0190), (0.0, -0.0752, 0.2212), tilt),
        touch((0.2644, 0.0030, 0.0190), (0.0, -0.1118, 0.0973), tilt),
        *block((0.1800, 0.2580, 0.0100), (0.0, 0.0020, 0.0030), dark, material="wood"),
        *block(
            (0.0152, 0.0181, 0.3160),
            (0.0, 0.0089, 0.1660),
            dark,
            about_x(math.radians(-15.8)),
            "wood",
        ),
    )
    region = Site(
        "top_region",
        (0.0, -0.08003, 0.21745),
        (0.10087, 0.02200, 0.00251),
        (0.8549119, -0.5187733, 0.0, 0.0),
    )
    part = Part("object", geoms, (region,))
    return Item(
        "turbosquid_objects/wine_rack/wine_rack.xml", part, Reach(0.06, 0.04, 0.025), (_WOOD,)
    )


def _desk_caddy() -> Item:
    """A tray of 125 by 415 mm with two wide compartments and, between them, a high one behind a low
    one (towards x).
    """
    wall, ends = "#7a4e2c", "#8d5d36"

    def panel(
        size: tuple[float, float, float], pos: tuple[float, float, float], color: str = wall
    ) -> Geoms:
        return block(size, pos, color, material="wood")

    geoms = (
        *panel((0.1360, 0.4220, 0.0240), (0.0030, 0.0010, -0.0080)),
        *panel((0.0050, 0.1300, 0.1220), (-0.0625, -0.1450, 0.0650)),
        *panel((0.0050, 0.1300, 0.1220), (-0.0625, 0.1470, 0.0650)),
        *panel((0.0050, 0.4220, 0.1220), (0.0685, 0.0010, 0.0650)),
        *panel((0.1260, 0.0050, 0.1220), (0.0030, -0.2075, 0.0650), ends),
        *panel((0.1260, 0.0050, 0.1220), (0.0030, 0.2095, 0.0650), ends),
        *panel((0.1260, 0.0050, 0.1400), (0.0030, -0.0745, 0.0740), ends),
        *panel((0.1260, 0.0050, 0.1400), (0.0030, 0.0735, 0.0740), ends),
        *panel((0.0050, 0.1430, 0.0740), (-0.0625, -0.0005, 0.0410)),
        *panel((0.0050, 0.1430, 0.1180), (0.0005, -0.0005, 0.0630)),
    )
    across = (0.0, 0.0, 1.0, 0.0)
    regions = (
        Site(
            "right_contain_region",
            (0.00631, -0.14339, 0.06558),
            (0.06196, 0.06216, 0.06046),
            across,
        ),
        Site(
            "left_contain_region", (0.00631, 0.14551, 0.06558), (0.06196, 0.06216, 0.06046), across
        ),
        Site(
            "back_contain_region", (0.03364, -0.00064, 0.08558), (0.02775, 0.06216, 0.06046), across
        ),
        Site(
            "front_contain_region",
            (-0.03102, -0.00064, 0.04054),
            (0.02775, 0.03595, 0.06216),
            (0.0, 0.0, 0.70711, -0.70711),
        ),
    )
    part = Part("object", geoms, regions)
    return Item(
        "turbosquid_objects/desk_caddy/desk_caddy.xml", part, Reach(0.06, 0.04, 0.025), (_WOOD,)
    )
