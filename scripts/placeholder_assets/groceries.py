"""Cans, bottles, cartons and boxes, which libero_object puts into its basket.

LIBERO keeps cans, ketchup, dressing and cartons lying along y of their own frame and the rest
upright on z; sizes and masses are about those of its meshes.
"""

from typing import Literal

from scripts.placeholder_assets.shapes import (
    Geom,
    Geoms,
    Item,
    Part,
    Reach,
    along_y,
    octagon,
    paint,
    prism,
    touch,
    turned,
)

_STEEL = "#c9ced3"
_USUAL_REACH = Reach(0.06, 0.04, 0.025)


def groceries() -> tuple[Item, ...]:
    """Return all groceries."""
    return (
        _grocery(
            "alphabet_soup",
            0.054,
            _can("#c8202f", "#f6f0dc", "#e8a92c"),
            Reach(0.04, 0.04, 0.025),
            up="y",
        ),
        _grocery("tomato_sauce", 0.054, _can("#2e7d3a", "#d8362a", "#f6f0dc"), up="y"),
        _grocery("ketchup", 0.049, _squeeze_bottle("#c01f1f", "#f3efe6", "#fbfbf7"), up="y"),
        _grocery("salad_dressing", 0.045, _squeeze_bottle("#e9dfc0", "#4c9a45", "#2f6d33"), up="y"),
        _grocery(
            "bbq_sauce",
            0.024,
            _sauce_bottle("#5a2617", "#e0a030", "#b3221e"),
            Reach(0.06, 0.06, 0.015),
        ),
        _grocery(
            "milk",
            0.068,
            _gable_carton("#f4f4f0", "#2c62b8", "#dfe9f7"),
            Reach(0.06, 0.04, 0.03),
            up="y",
        ),
        _grocery("orange_juice", 0.068, _gable_carton("#f39322", "#3f8f3a", "#ffe9b8"), up="y"),
        _grocery(
            "butter",
            0.010,
            _packet((0.0774, 0.0400, 0.0180), "#f5d76b", "#2a5caa"),
            Reach(0.02, 0.02, 0.02),
        ),
        _grocery(
            "cream_cheese",
            0.012,
            _packet((0.0828, 0.0426, 0.0194), "#dfe6ee", "#2f6fb5"),
            Reach(0.025, 0.025, 0.03),
        ),
        _grocery(
            "chocolate_pudding", 0.022, _packet((0.0834, 0.0494, 0.0298), "#5a3420", "#e9d3a6")
        ),
        _grocery("cookies", 0.019, _packet((0.0614, 0.0836, 0.0200), "#b3242a", "#f0c66a")),
    )


def _grocery(
    name: str,
    mass_kg: float,
    geoms: Geoms,
    reach: Reach = _USUAL_REACH,
    up: Literal["y", "z"] = "z",
) -> Item:
    part = Part("object", along_y(geoms) if up == "y" else geoms, mass_kg=mass_kg)
    return Item(f"stable_hope_objects/{name}/{name}.xml", part, reach, up=up)


def _can(label: str, band: str, stripe: str) -> Geoms:
    """A tin of 65 by 81 mm: steel rims, a paper label, a band around it."""
    r, h = 0.0325, 0.0405
    side = [
        (r, -h),
        (r, -h + 0.004),
        (r - 0.001, -h + 0.004),
        (r - 0.001, h - 0.004),
        (r, h - 0.004),
        (r, h),
    ]
    lid = [(r - 0.003, h), (r - 0.003, h - 0.002), (0, h - 0.002)]
    return (
        *octagon(0.0635, -h, h),
        turned([(0, -h), *side, *lid], _STEEL),
        _sleeve(r - 0.0006, -h + 0.005, h - 0.005, label),
        _sleeve(r - 0.0002, -0.012, 0.018, band),
        _sleeve(r, -0.024, -0.017, stripe),
    )


def _sleeve(radius: float, bottom: float, top: float, color: str) -> Geom:
    """A thin label around something round."""
    return turned([(radius, bottom), (radius, top)], color)


def _squeeze_bottle(body: str, label: str, cap: str) -> Geoms:
    """A flat bottle of 62 by 40 by 147 mm, wide below, with a cap."""
    right = [(0.0270, -0.0740), (0.0305, -0.0640), (0.0300, 0.0000), (0.0200, 0.0400)]
    return (
        touch((0.0580, 0.0360, 0.0880), (0.0, 0.0, -0.0300), density=1.3),
        touch((0.0380, 0.0300, 0.0280), (0.0, 0.0, 0.0280)),
        touch((0.0340, 0.0280, 0.0300), (0.0, 0.0, 0.0580)),
        prism(_both_sides(right), 0.0380, body),
        paint((0.0520, 0.0396, 0.0520), (0.0, 0.0, -0.0340), label),
        paint((0.0240, 0.0404, 0.0200), (0.0, 0.0, -0.0320), cap),
        turned([(0, 0.0400), (0.0185, 0.0400), (0.0165, 0.0730), (0, 0.0740)], cap, 14),
    )


def _sauce_bottle(body: str, label: str, cap: str) -> Geoms:
    """A flat bottle of 49 by 33 by 114 mm with shoulders and a screw cap."""
    right = [(0.0240, -0.0560), (0.0245, 0.0000), (0.0150, 0.0300)]
    return (
        touch((0.0470, 0.0290, 0.0536), (0.0, 0.0, -0.0280)),
        touch((0.0362, 0.0286, 0.0292), (0.0, 0.0, 0.0130)),
        touch((0.0280, 0.0262, 0.0270), (0.0, 0.0, 0.0400)),
        prism(_both_sides(right), 0.0310, body),
        paint((0.0484, 0.0320, 0.0420), (0.0, 0.0, -0.0250), label),
        paint((0.0486, 0.0326, 0.0100), (0.0, 0.0, -0.0250), cap),
        turned([(0, 0.0280), (0.0105, 0.0280), (0.0105, 0.0360), (0, 0.0360)], body, 14),
        turned([(0, 0.0360), (0.0135, 0.0360), (0.0135, 0.0550), (0, 0.0560)], cap, 14),
    )


def _gable_carton(body: str, band: str, panel: str) -> Geoms:
    """A carton of 54 by 54 by 143 mm with a roof and a folded ridge."""
    w, eaves, ridge = 0.0270, 0.0400, 0.0620
    return (
        touch((0.0525, 0.0525, 0.1100), (0.0, 0.0, -0.0160), density=1.2),
        touch((0.0525, 0.0270, 0.0220), (0.0, 0.0, 0.0500)),
        paint((2 * w, 2 * w, eaves + 0.0710), (0.0, 0.0, (eaves - 0.0710) / 2), body),
        prism(_both_sides([(w, eaves), (0.0030, ridge)]), 2 * w, body),
        paint((0.0030, 2 * w, 0.0110), (0.0, 0.0, ridge + 0.0040), band),
        paint((2 * w + 0.0008, 2 * w + 0.0008, 0.0280), (0.0, 0.0, -0.0500), band),
        paint((0.0340, 2 * w + 0.0012, 0.0360), (0.0, 0.0, 0.0040), panel),
        paint((2 * w + 0.0012, 0.0340, 0.0360), (0.0, 0.0, 0.0040), panel),
        paint((0.0200, 2 * w + 0.0018, 0.0100), (0.0, 0.0, 0.0060), band),
        paint((2 * w + 0.0018, 0.0200, 0.0100), (0.0, 0.0, 0.0060), band),
    )


def _packet(size: tuple[float, float, float], body: str, label: str) -> Geoms:
    """A small packet with a label on its large faces and a stripe around."""
    x, y, z = size
    return (
        touch((x - 0.001, y - 0.0005, z - 0.001)),
        paint(size, (0.0, 0.0, 0.0), body),
        paint((x * 0.62, y * 0.66, z + 0.0008), (0.0, 0.0, 0.0), label),
        paint((x * 0.42, y * 0.16, z + 0.0014), (0.0, 0.0, 0.0), body),
        paint((x + 0.0006, y + 0.0006, z * 0.24), (0.0, 0.0, 0.0), label),
    )


def _both_sides(right: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a closed outline from its right half, given from bottom to top."""
    return right + [(-x, z) for x, z in reversed(right)]
