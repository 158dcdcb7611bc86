"""`python -m scripts.placeholder_assets.contact_sheet OUT.png`: an image of every placeholder asset and
of tasks of each suite.
"""

import argparse
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.placeholder_assets.files import all_items
from scripts.placeholder_assets.shapes import Item, about_x
from vla_rl.envs.libero.assets import PLACEHOLDER_ASSETS, find_assets
from vla_rl.envs.libero.env import DRAWN_GROUPS, LiberoEnv
from vla_rl.envs.libero.loading import load_simulator
from vla_rl.envs.mujoco.loading import make_context

SCENES = (
    *(("libero_object", 0), ("libero_spatial", 5), ("libero_goal", 9)),
    *(("libero_10", 0), ("libero_10", 5), ("libero_10", 9)),
)
"""The tasks on the sheet, by suite and task id."""

_TILE, _COLUMNS, _SCENE, _LINE = 180, 7, 210, 16
_PAPER = 245


def contact_sheet() -> NDArray[np.uint8]:
    """Draw items in rows of seven, then the tasks; uint8 [H, W, 3]."""
    tiles = [_with_name(draw_item(item, _TILE), item.name) for item in all_items()]
    scenes = [
        _with_name(_draw_task(suite, task_id), f"{suite}/{task_id}") for suite, task_id in SCENES
    ]
    return np.concatenate([_in_rows(tiles, _COLUMNS), _in_rows(scenes, len(scenes))])


def draw_item(item: Item, size: int) -> NDArray[np.uint8]:
    """Draw one item on a white floor, seen from the front and above; doors and drawers are open."""
    mujoco = load_simulator().mujoco
    model = _stage(item)
    data = mujoco.MjData(model)
    for joint, angle in (("bottom_level", -0.10), ("top_level", -0.05), ("microjoint", -1.2)):
        if mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_JOINT, joint) >= 0:
            data.joint(joint).qpos = angle
    mujoco.mj_forward(model, data)
    drawn = [
        geom
        for geom in range(model.ngeom)
        if model.geom_group[geom] == 1 and model.geom_bodyid[geom] > 0
    ]
    model.body_pos[1, 2] -= min(data.geom_xpos[g, 2] - _half_height(model, data, g) for g in drawn)
    mujoco.mj_forward(model, data)
    middle = np.mean([data.geom_xpos[drawn].min(0), data.geom_xpos[drawn].max(0)], axis=0)
    reach = max(
        np.linalg.norm(data.geom_xpos[g] - middle) + 0.8 * model.geom_rbound[g] for g in drawn
    )
    context = make_context(size)
    context.make_current()
    renderer = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
    azimuth = 200 if item.name.endswith("_mug") else 115  # their handles are at the back
    camera, option = mujoco.MjvCamera(), mujoco.MjvOption()
    camera.lookat[:], camera.distance, camera.azimuth, camera.elevation = (
        middle,
        3.1 * reach,
        azimuth,
        -32,
    )
    option.geomgroup[:] = DRAWN_GROUPS
    scene = mujoco.MjvScene(model, maxgeom=200)
    mujoco.mjv_updateScene(model, data, option, None, camera, mujoco.mjtCatBit.mjCAT_ALL, scene)
    mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, renderer)
    image = np.empty((size, size, 3), np.uint8)
    viewport = mujoco.MjrRect(0, 0, size, size)
    mujoco.mjr_render(viewport, scene, renderer)
    mujoco.mjr_readPixels(image, None, viewport, renderer)
    renderer.free()
    context.free()
    return image[::-1]


def _stage(item: Item) -> Any:
    """Build a model of the item, standing upright under two lamps."""
    mujoco = load_simulator().mujoco
    spec = mujoco.MjSpec.from_file(str(find_assets(PLACEHOLDER_ASSETS).path / item.file))
    if item.up == "y":
        spec.body("object").quat = about_x(math.pi / 2)
    world = spec.worldbody
    world.add_geom(
        type=mujoco.mjtGeom.mjGEOM_PLANE, size=[3, 3, 0.1], rgba=[0.9, 0.9, 0.9, 1], group=1
    )
    for x, y in ((0.8, -1.0), (-0.8, -0.6)):
        world.add_light(
            pos=[x, y, 1.6], dir=[-x, -y, -1.6], diffuse=[0.36, 0.36, 0.36], castshadow=False
        )
    spec.visual.global_.offwidth = spec.visual.global_.offheight = 512
    return spec.compile()


def _half_height(model: Any, data: Any, geom: int) -> float:
    """Return how far the geom's bounding box reaches below its centre."""
    return float(np.abs(data.geom_xmat[geom].reshape(3, 3)[2]) @ model.geom_aabb[geom, 3:])


def _draw_task(suite: str, task_id: int) -> NDArray[np.uint8]:
    env = LiberoEnv(suite, task_id, assets=PLACEHOLDER_ASSETS, image_size=_SCENE, wrist_image=False)
    try:
        observation, _ = env.reset(options={"init_state_id": 0})
        image: NDArray[np.uint8] = observation["image"][:, ::-1]
        return image
    finally:
        env.close()


def _with_name(image: NDArray[np.uint8], name: str) -> NDArray[np.uint8]:
    import cv2  # slow to import

    bar = np.full((_LINE, image.shape[1], 3), _PAPER, np.uint8)
    cv2.putText(
        bar, name[:28], (3, 11), cv2.FONT_HERSHEY_SIMPLEX, 0.32, (40, 40, 40), 1, cv2.LINE_AA
    )
    return np.concatenate([image, bar])


def _in_rows(tiles: list[NDArray[np.uint8]], columns: int) -> NDArray[np.uint8]:
    height, width = tiles[0].shape[:2]
    rows = -(-len(tiles) // columns)
    sheet = np.full((rows * height, columns * width, 3), _PAPER, np.uint8)
    for i, tile in enumerate(tiles):
        row, column = divmod(i, columns)
        sheet[row * height : (row + 1) * height, column * width : (column + 1) * width] = tile
    return sheet


def main() -> None:
    """Draw and write the image."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.placeholder_assets.contact_sheet", description=__doc__
    )
    parser.add_argument("out", type=Path, help="PNG file to write")
    out = parser.parse_args().out
    import cv2

    sheet = contact_sheet()
    cv2.imwrite(os.fspath(out), sheet[..., ::-1], [cv2.IMWRITE_PNG_COMPRESSION, 9])
    print(
        f"{sheet.shape[1]} x {sheet.shape[0]} pixels, {out.stat().st_size / 1000:.0f} kB in {out}"
    )


if __name__ == "__main__":
    main()
