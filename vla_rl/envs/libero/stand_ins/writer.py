"""Write items and rooms as MuJoCo's XML, in the structure that LIBERO's loader expects.

Each file holds `worldbody/body/body[@name='object']`: the outer body has the three sites from which
placement is computed, the inner one is the item itself. Every geom names its group: 0 collides and
is never drawn, 1 is drawn.
"""

import xml.etree.ElementTree as ET
from collections.abc import Iterable

from vla_rl.envs.libero.stand_ins.model import UPRIGHT, Geom, Item, Material, Part, Site, Surface
from vla_rl.envs.libero.stand_ins.scenes import CAMERAS, LIGHTS, Room

_TOUCHED = {
    "type": "box",
    "group": "0",
    "friction": "0.95 0.3 0.1",
    "solref": "0.001 1",
    "solimp": "0.998 0.998 0.001",
    "rgba": "0.8 0.8 0.8 0.3",
}
"""LIBERO's own contact parameters."""

_SEEN = {"type": "box", "group": "1", "contype": "0", "conaffinity": "0", "mass": "1e-9"}


def item_xml(item: Item) -> str:
    """Return the file of an item."""
    root = _document(item.name)
    _add_defaults(root)
    _add_assets(
        root, item.materials, _surfaces(item.root), "../" * item.file.count("/") + "textures/"
    )
    outer = ET.SubElement(ET.SubElement(root, "worldbody"), "body")
    _add_part(outer, item.root, _names(item.root))
    size = _text([item.reach.site_size])
    reach = item.reach
    for name, pos in (
        ("bottom_site", (0.0, 0.0, -reach.below)),
        ("top_site", (0.0, 0.0, reach.above)),
        ("horizontal_radius_site", (reach.around, reach.around, 0.0)),
    ):
        ET.SubElement(outer, "site", name=name, pos=_text(pos), size=size, rgba="0 0 0 0")
    return _to_text(root)


def room_xml(room: Room) -> str:
    """Return the file of a room."""
    root = _document(room.name)
    _add_defaults(root)
    everything = Part("", room.geoms, parts=room.parts)
    names = _names(everything)
    _add_assets(root, room.materials, _surfaces(everything), "../textures/")
    sky = {
        "type": "skybox",
        "builtin": "gradient",
        "rgb1": ".9 .9 1",
        "rgb2": ".2 .3 .4",
        "width": "64",
        "height": "64",
    }
    ET.SubElement(root.find("asset") or root, "texture", sky)
    world = ET.SubElement(root, "worldbody")
    for geom in room.geoms:
        _add_geom(world, geom, names, 0.0)
    for part in room.parts:
        _add_part(world, part, names)
    for i, pos in enumerate(LIGHTS, start=1):
        lamp = {"name": f"light{i}", "pos": _text(pos), "dir": "0 -.15 -1", "directional": "false"}
        ET.SubElement(
            world,
            "light",
            lamp | {"diffuse": ".8 .8 .8", "specular": ".3 .3 .3", "castshadow": "false"},
        )
    for name, (pos, quat) in CAMERAS.items():
        ET.SubElement(world, "camera", name=name, mode="fixed", pos=_text(pos), quat=_text(quat))
    return _to_text(root)


def _document(name: str) -> ET.Element:
    root = ET.Element("mujoco", model=name)
    ET.SubElement(root, "compiler", angle="radian")
    return root


def _add_defaults(root: ET.Element) -> None:
    default = ET.SubElement(root, "default")
    for name, values in (("touched", _TOUCHED), ("seen", _SEEN)):
        ET.SubElement(ET.SubElement(default, "default", {"class": name}), "geom", values)


def _surfaces(part: Part) -> list[Surface]:
    own = [geom.surface for geom in part.geoms if geom.surface is not None]
    return own + [surface for child in part.parts for surface in _surfaces(child)]


def _names(part: Part) -> dict[Surface, str]:
    """Return a name for every distinct surface below `part`."""
    return {surface: f"surface{i}" for i, surface in enumerate(dict.fromkeys(_surfaces(part)))}


def _add_assets(
    root: ET.Element, materials: Iterable[Material], surfaces: list[Surface], textures: str
) -> None:
    asset = ET.SubElement(root, "asset")
    for material in materials:
        name = material.texture_name or material.texture
        file = f"{textures}{material.texture}.png"
        ET.SubElement(asset, "texture", name=name, type=material.projection, file=file)
        look = {
            "name": material.name,
            "texture": name,
            "texrepeat": _text(material.repeat),
            "specular": _text([material.specular]),
            "shininess": _text([material.shininess]),
        }
        if material.projection == "2d":
            look["texuniform"] = "true"
        ET.SubElement(asset, "material", look)
    for i, surface in enumerate(dict.fromkeys(surfaces)):
        vertices = " ".join(" ".join(map(str, vertex)) for vertex in surface.vertices)
        faces = " ".join(" ".join(map(str, face)) for face in surface.faces)
        mesh = {"name": f"surface{i}", "scale": "1e-4 1e-4 1e-4", "inertia": "shell"}
        ET.SubElement(asset, "mesh", mesh | {"vertex": vertices, "face": faces})


def _add_part(around: ET.Element, part: Part, names: dict[Surface, str]) -> None:
    body = ET.SubElement(around, "body", name=part.name)
    if any(part.pos):
        body.set("pos", _text(part.pos))
    if part.quat != UPRIGHT:
        body.set("quat", _text(part.quat))
    if part.inertia:
        inertia = _text([part.inertia] * 3)
        ET.SubElement(
            body, "inertial", pos="0 0 0", mass=_text([part.mass_kg]), diaginertia=inertia
        )
    if part.joint is not None:
        joint = part.joint
        ET.SubElement(
            body,
            "joint",
            name=joint.name,
            type=joint.type,
            axis=_text(joint.axis),
            limited="true",
            range=_text(joint.range),
            damping=_text([joint.damping]),
        )
    for site in part.sites:
        _add_site(body, site)
    weight = sum(_volume(geom) * geom.density for geom in part.geoms if geom.is_solid)
    for geom in part.geoms:
        mass_kg = (
            part.mass_kg * _volume(geom) * geom.density / weight
            if geom.is_solid and weight
            else 0.0
        )
        _add_geom(body, geom, names, mass_kg)
    for child in part.parts:
        _add_part(body, child, names)


def _add_site(body: ET.Element, site: Site) -> None:
    rgba = f"{_rgb(site.color)} 1" if site.color else "0 0 0 0"
    place = {"name": site.name, "type": site.type, "pos": _text(site.pos), "quat": _text(site.quat)}
    ET.SubElement(body, "site", place | {"size": _text(site.size), "rgba": rgba})


def _add_geom(body: ET.Element, geom: Geom, names: dict[Surface, str], mass_kg: float) -> None:
    values = {"class": "seen" if geom.color else "touched"}
    if geom.type == "plane":  # the floor collides and is drawn
        values = {"group": "1", "condim": "3"}
    if geom.type != "box":
        values["type"] = geom.type
    if geom.name:
        values["name"] = geom.name
    if geom.size:
        values["size"] = _text(geom.size)
    if any(geom.pos):
        values["pos"] = _text(geom.pos)
    if geom.quat != UPRIGHT:
        values["quat"] = _text(geom.quat)
    if geom.surface is not None:
        values["mesh"] = names[geom.surface]
    if geom.material:
        values["material"] = geom.material
    if geom.color and geom.color != "#ffffff":
        values["rgba"] = f"{_rgb(geom.color)} 1"
    if mass_kg:
        values["mass"] = f"{mass_kg:.3g}"
    ET.SubElement(body, "geom", values)


def _volume(geom: Geom) -> float:
    return 8 * geom.size[0] * geom.size[1] * geom.size[2] if geom.type == "box" else 0.0


def _rgb(color: str) -> str:
    return _text([round(value / 255, 3) for value in bytes.fromhex(color[1:])])


def _text(numbers: Iterable[float]) -> str:
    return " ".join(f"{round(number, 5) + 0.0:.5g}" for number in numbers)


def _to_text(root: ET.Element) -> str:
    ET.indent(root, " ")
    return ET.tostring(root, encoding="unicode") + "\n"
