"""Bowls, plates, mugs, pots and the basket: things that hold other things, so their walls are rings
of panels.
"""

import math

from scripts.placeholder_assets.shapes import (
    Geoms,
    Item,
    Material,
    Part,
    Reach,
    Site as Location,
    about_x,
    about_y,
    about_z,
    block,
    moved,
    octagon,
    paint,
    ring,
    touch,
    turned,
)

_WICKER = Material("wicker", "wicker", (4.0, 4.0), specular=0.1)


def tableware() -> tuple[Item, ...]:
    """Return all tableware."""
    return (
        _scanned("akita_black_bowl", 0.055, _bowl()),
        _scanned("plate", 0.030, _plate()),
        _scanned("glazed_rim_porcelain_ramekin", 0.038, _ramekin()),
        _scanned("chefmate_8_frypan", 0.110, _frypan()),
        _basket(),
        _modelled("porcelain_mug", 0.060, _mug(0.0340, 0.0800, "#f7f7f4", "#eceae4", "#f7f7f4")),
        _modelled("red_coffee_mug", 0.060, _mug(0.0335, 0.0850, "#b81f24", "#f0e9e0", "#b81f24")),
        _modelled("white_yellow_mug", 0.060, _mug(0.0345, 0.0760, "#f7f7f4", "#f0c02f", "#f0c02f")),
        _modelled("moka_pot", 0.131, _moka_pot()),
        _modelled("wine_bottle", 0.051, _wine_bottle()),
        _modelled("black_book", 0.060, _make_book()),
    )


def _scanned(name: str, mass_kg: float, geoms: Geoms) -> Item:
    part = Part("object", geoms, mass_kg=mass_kg)
    return Item(f"stable_scanned_objects/{name}/{name}.xml", part, Reach(0.06, 0.04, 0.025))


def _modelled(name: str, mass_kg: float, geoms: Geoms) -> Item:
    part = Part("object", geoms, mass_kg=mass_kg)
    return Item(f"turbosquid_objects/{name}/{name}.xml", part, Reach(0.06, 0.04, 0.025))


def _bowl() -> Geoms:
    """Return a bowl, 106 mm wide and 52 mm high. Its foot flares from a radius of 29 to 41 mm, on
    which it sits in the ramekin.
    """
    outside = [
        (0, 0.0),
        (0.0270, 0.0),
        (0.0300, 0.0030),
        (0.0410, 0.0175),
        (0.0490, 0.0350),
        (0.0530, 0.0525),
    ]
    inside = [(0.0510, 0.0525), (0.0470, 0.0360), (0.0390, 0.0190), (0.0280, 0.0080), (0, 0.0068)]
    return (
        *octagon(0.0520, 0.0016, 0.0068),
        *ring((0.0300, 0.0040), (0.0410, 0.0175), 0.0020, 8),
        *ring((0.0410, 0.0165), (0.0485, 0.0345), 0.0026, 8),
        *ring((0.0488, 0.0335), (0.0524, 0.0521), 0.0034, 12),
        turned(outside + inside, "#aeb0ac", 20),
    )


def _plate() -> Geoms:
    """Return a plate, 137 mm wide and 19 mm high; its rim slopes by 21 degrees, so that two
    pressing fingers drag it along.

    Like LIBERO's own, it reaches 2.5 mm below its origin.
    """
    outside = [(0, -0.0024), (0.0320, -0.0024), (0.0685, 0.0120), (0.0685, 0.0165)]
    inside = [(0.0665, 0.0165), (0.0370, 0.0064), (0.0310, 0.0058), (0, 0.0056)]
    return (
        *octagon(0.0600, -0.0025, 0.0060),
        *ring((0.0314, -0.0020), (0.0670, 0.0117), 0.0050, 8),
        turned(outside + inside, "#dcd8d4", 20),
        turned([(0.0630, 0.0158), (0.0540, 0.0127)], "#a35d52", 20),
    )


def _ramekin() -> Geoms:
    """Return a ramekin, 89 mm wide and 43 mm high.

    The bowl of libero_spatial rests on its rim, of inner radius 38.5 mm.
    """
    outside = [
        (0, 0.0),
        (0.0350, 0.0),
        (0.0375, 0.0020),
        (0.0435, 0.0380),
        (0.0443, 0.0400),
        (0.0443, 0.0430),
    ]
    inside = [(0.0390, 0.0430), (0.0385, 0.0400), (0.0330, 0.0080), (0, 0.0074)]
    return (
        *octagon(0.0600, 0.0007, 0.0073),
        *ring((0.0378, 0.0030), (0.0440, 0.0427), 0.0052, 12),
        turned(outside + inside, "#efeadf", 20),
        turned(
            [(0.0440, 0.0385), (0.0447, 0.0400), (0.0447, 0.0433), (0.0387, 0.0433)], "#8a5a33", 24
        ),
    )


def _frypan() -> Geoms:
    """A pan of 170 mm, 34 mm high, with a handle of 150 mm towards -x."""
    outside = [(0, 0.0), (0.0640, 0.0), (0.0850, 0.0320), (0.0850, 0.0340)]
    inside = [(0.0825, 0.0340), (0.0620, 0.0040), (0, 0.0040)]
    handle = moved(
        (
            paint((0.1500, 0.0240, 0.0120), (0.0, 0.0, 0.0), "#1c1c1e"),
            touch((0.1500, 0.0240, 0.0120)),
        ),
        (-0.1560, 0.0, 0.0360),
        about_y(math.radians(6)),
    )
    return (
        *octagon(0.1240, 0.0004, 0.0050),
        *ring((0.0640, 0.0020), (0.0850, 0.0338), 0.0036, 10),
        turned(outside + inside, "#47484d", 20),
        turned([(0.0600, 0.0046), (0, 0.0046)], "#2a2b2e", 20),
        *handle,
        paint((0.0260, 0.0200, 0.0080), (-0.0820, 0.0, 0.0270), "#c9ced3"),
    )


def _basket() -> Item:
    """An open basket of 150 by 150 by 146 mm; LIBERO's goal is its contain_region."""
    side, height, wall = 0.1500, 0.1456, 0.0134
    lean = math.radians(2)
    floor = block((0.1440, 0.1440, 0.0170), (0.0, 0.0, 0.0131), "#b98a55", material="wicker")
    walls = [
        moved(
            block(
                (wall, side - 0.012, 0.1270), (0.0, 0.0, 0.0), "#c79a63", about_y(lean), "wicker"
            ),
            (math.cos(angle) * 0.0728, math.sin(angle) * 0.0728, 0.0800),
            about_z(angle),
        )
        for angle in (0.0, math.pi / 2, math.pi, -math.pi / 2)
    ]
    rims = [
        moved(
            (paint((0.0190, side + 0.016, 0.0140), (0.0, 0.0, 0.0), "#8d6236", material="wicker"),),
            (math.cos(angle) * 0.0752, math.sin(angle) * 0.0752, height - 0.0060),
            about_z(angle),
        )
        for angle in (0.0, math.pi / 2, math.pi, -math.pi / 2)
    ]
    region = Location(
        "contain_region", (0.0, 0.0, 0.07185), (0.06108, 0.06108, 0.06949), (0.0, 0.0, 0.0, 1.0)
    )
    everything = (*floor, *(geom for part in walls + rims for geom in part))
    part = Part("object", everything, (region,), mass_kg=0.68)
    return Item(
        "stable_scanned_objects/basket/basket.xml", part, Reach(0.06, 0.04, 0.025), (_WICKER,)
    )


def _mug(radius: float, height: float, outside: str, inside: str, grip: str) -> Geoms:
    """A mug thin enough to be gripped around, with a handle towards y."""
    r, wall = radius, 0.0036
    loop = (
        *block((0.0090, 0.0260, 0.0080), (0.0, r + 0.0110, height * 0.80), grip),
        *block((0.0090, 0.0260, 0.0080), (0.0, r + 0.0110, height * 0.28), grip),
        *block((0.0090, 0.0070, height * 0.60), (0.0, r + 0.0255, height * 0.54), grip),
    )
    shell = [
        (0, 0.0),
        (r - 0.0030, 0.0),
        (r, 0.0040),
        (r, height),
        (r - wall, height),
        (r - wall, 0.0080),
        (0, 0.0080),
    ]
    lining = [
        (0, 0.0081),
        (r - wall - 0.0002, 0.0081),
        (r - wall - 0.0002, height - 0.0008),
        (r - wall - 0.0008, height - 0.0008),
    ]
    return (
        *octagon(2 * r - 0.0080, 0.0004, 0.0070),
        *ring((r, 0.0030), (r, height), wall, 10),
        turned(shell, outside),
        turned([*lining, (r - wall - 0.0008, 0.0086), (0, 0.0086)], inside),
        *loop,
    )


def _moka_pot() -> Geoms:
    """An eight-sided coffee pot, 153 mm high, its origin at half its height, its handle towards y.

    Where it is narrowest it is 75.6 mm wide (LIBERO's own: 75.9), so an open hand has 2 mm to spare
    on each side.
    """
    boiler = [(0, -0.0670), (0.0400, -0.0670), (0.0355, -0.0120), (0, -0.0120)]
    jug = [(0, 0.0020), (0.0345, 0.0020), (0.0396, 0.0620), (0, 0.0620)]
    lid = [(0, 0.0620), (0.0390, 0.0620), (0.0090, 0.0700), (0, 0.0700)]
    turn = about_z(math.pi / 8)
    return (
        *moved(octagon(0.0743, -0.0661, 0.0670), turn=turn),
        touch((0.0320, 0.0180, 0.0400), (0.0, -0.0460, 0.0430)),
        touch((0.0110, 0.0120, 0.0230), (0.0, 0.0, 0.0740)),
        *moved((turned(boiler, "#dedad8", 8),), turn=turn),
        turned([(0.0320, -0.0125), (0.0320, 0.0025)], "#c2bebc", 8),
        turned(jug, "#e6e2e0", 8),
        turned(lid, "#dedad8", 8),
        paint(
            (0.0200, 0.0300, 0.0180), (0.0, -0.0420, 0.0470), "#e6e2e0", about_x(math.radians(-30))
        ),
        turned([(0, 0.0690), (0.0050, 0.0700), (0.0079, 0.0870), (0, 0.0870)], "#1e1e1e", 12),
        *block((0.0131, 0.0340, 0.0140), (0.0, 0.0530, 0.0550), "#1e1e1e"),
        *block(
            (0.0131, 0.0150, 0.0740), (0.0, 0.0775, 0.0240), "#1e1e1e", about_x(math.radians(-12))
        ),
    )


def _wine_bottle() -> Geoms:
    """A bottle 43 mm wide and 159 mm high; the fingers close on its neck."""
    glass = [
        (0, 0.0),
        (0.0200, 0.0),
        (0.0216, 0.0020),
        (0.0216, 0.0720),
        (0.0170, 0.0830),
        (0.0080, 0.0960),
    ]
    return (
        *octagon(0.0425, 0.0008, 0.0750),
        *octagon(0.0300, 0.0750, 0.0860),
        *octagon(0.0155, 0.0860, 0.1585),
        turned(
            [*glass, (0.0075, 0.1540), (0.0085, 0.1540), (0.0085, 0.1570), (0, 0.1570)],
            "#16301a",
            16,
        ),
        turned([(0.0219, 0.0160), (0.0219, 0.0560)], "#efe6cf", 16),
        turned([(0.0222, 0.0330), (0.0222, 0.0430)], "#7d1f2b", 16),
        turned([(0.0082, 0.1270), (0.0078, 0.1540)], "#7d1f2b", 12),
        turned([(0.0060, 0.1560), (0.0060, 0.1590), (0, 0.1590)], "#c79a63", 12),
    )


def _make_book() -> Geoms:
    """A hardback of 28 by 105 by 130 mm, standing on its lower edge, its spine towards -y."""
    x, y, z = 0.0280, 0.1050, 0.1300
    return (
        touch((x, y, z)),
        paint((x - 0.0060, y - 0.0040, z - 0.0060), (0.0, 0.0010, 0.0), "#efe9d8"),
        paint((0.0030, y, z), ((x - 0.0030) / 2, 0.0, 0.0), "#1b1c20"),
        paint((0.0030, y, z), (-(x - 0.0030) / 2, 0.0, 0.0), "#1b1c20"),
        paint((x, 0.0030, z), (0.0, -(y - 0.0030) / 2, 0.0), "#1b1c20"),
        paint((x + 0.0006, 0.0560, 0.0300), (0.0, 0.0060, 0.0220), "#c9a24a"),
        paint((0.0120, 0.0010, 0.0500), (0.0, -y / 2, 0.0100), "#c9a24a"),
    )
