"""Textures of a model with no more pixels than its pictures show, and only those that they show.

OpenGL keeps of each texture a chain of versions, each half as wide as the one before, and draws a
surface from the two whose pixels are about as large as those of the picture. The first ones of a
chain that begins with 4096 pixels a side are never used for pictures of 84, but they take a hundred
times the memory of those that are. Here a chain begins later.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from vla_rl.envs.mujoco.loading import load_mujoco

_TEXELS_A_PIXEL: Final = 8
"""A texture keeps as many pixels a side as this many pictures: more than a camera in a hand uses,
which sees an eighth of a surface."""


@contextlib.contextmanager
def only_textures(model: Any, is_used: np.ndarray) -> Iterator[None]:
    """Within this context, a new render context uploads one pixel of each other texture.

    Args:
        model: MuJoCo's own model.
        is_used: bool [ntex], whether anything that is drawn has the texture.
    """
    sides = model.tex_height.copy(), model.tex_width.copy()
    model.tex_height[~is_used] = model.tex_width[~is_used] = 1
    try:
        yield
    finally:
        model.tex_height[:], model.tex_width[:] = sides


def used_textures(model: Any, is_drawn: np.ndarray) -> np.ndarray:
    """Return bool [ntex]: whether a geom that is drawn has the texture, or what is not a geom.

    Args:
        model: MuJoCo's own model.
        is_drawn: bool [ngeom].
    """
    others = (model.site_matid, model.tendon_matid, model.skin_matid, model.flex_matid)
    materials = np.concatenate([model.geom_matid[is_drawn], *others])
    textures = model.mat_texid[materials[materials >= 0]].reshape(-1)
    is_used: np.ndarray = model.tex_type == load_mujoco().mjtTexture.mjTEXTURE_SKYBOX
    is_used[textures[textures >= 0]] = True
    return is_used


@contextlib.contextmanager
def reduced_textures(model: Any, size: int) -> Iterator[None]:
    """Within this context, flat textures of the model are as small as its pictures allow.

    Args:
        model: MuJoCo's own model.
        size: side of the picture, in pixels.
    """
    before, sides = [], (model.tex_height.copy(), model.tex_width.copy())
    try:
        for texture in np.flatnonzero(model.tex_type == load_mujoco().mjtTexture.mjTEXTURE_2D):
            shape = (int(each[texture]) for each in (*sides, model.tex_nchannel))
            height, width, channels = shape
            first = int(model.tex_adr[texture])
            whole = model.tex_data[first : first + height * width * channels]
            texels = halved_until(whole.reshape(height, width, channels), _TEXELS_A_PIXEL * size)
            if texels.shape[0] == height:
                continue
            rows = slice(first, first + texels.size)
            before.append((rows, model.tex_data[rows].copy()))
            model.tex_data[rows] = texels.reshape(-1)
            model.tex_height[texture], model.tex_width[texture] = texels.shape[:2]
        yield
    finally:
        for rows, bytes_before in before:
            model.tex_data[rows] = bytes_before
        model.tex_height[:], model.tex_width[:] = sides


def halved_until(texels: np.ndarray, side: int) -> np.ndarray:
    """Return uint8 [h, w, c] halved, as OpenGL halves it, while both sides stay at least `side`."""
    while min(texels.shape[:2]) >= 2 * side and not (texels.shape[0] % 2 or texels.shape[1] % 2):
        rows = texels[0::2].astype(np.uint16) + texels[1::2]
        texels = ((rows[:, 0::2] + rows[:, 1::2] + 2) >> 2).astype(np.uint8)
    return texels
