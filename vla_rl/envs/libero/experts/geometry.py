"""The experts' view of the scene: the collision boxes of bodies, and clouds of points on their
surfaces.

Everything is in the world frame, in metres. Each collision shape is replaced by its bounding box in
its own frame, which is exact for LIBERO's assets, because they are made of boxes.
"""

from collections.abc import Collection
from typing import Any

import numpy as np

from vla_rl.envs.libero.scene import Scene

_SIGNS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], np.float64)
_SPACING_M = 0.01
"""Distance between neighbouring points of a cloud (m)."""


def origin(scene: Scene, name: str) -> np.ndarray:
    """Return the origin of an object, a fixture or a region, float64 [3].

    Goals are evaluated by it.
    """
    body = scene.domain.obj_body_id.get(name)
    return np.array(scene.data.site(name).xpos if body is None else scene.data.xpos[body])


def root_body(scene: Scene, name: str) -> int:
    """Return the outermost body of an object or a fixture."""
    return int(scene.domain.obj_body_id[name])


def box_corners(scene: Scene, body: int) -> np.ndarray:
    """Return the corners of the N collision boxes of `body` and of all bodies attached to it,
    float64 [N, 8, 3].
    """
    return np.array([_corners(scene, geom) for geom in solid_geoms(scene.model, body)]).reshape(
        -1, 8, 3
    )


def surface_points(scene: Scene, bodies: Collection[int]) -> np.ndarray:
    """Return points on the collision boxes of `bodies` and of their children, at most 1 cm apart,
    float64 [N, 3].
    """
    clouds = [_points(scene, geom) for body in bodies for geom in solid_geoms(scene.model, body)]
    return np.concatenate(clouds) if clouds else np.empty((0, 3))


def fixed_points(scene: Scene, body: int) -> np.ndarray:
    """Return points on the collision boxes of `body` and of the parts that are fixed to it, without
    doors and drawers, float64 [N, 3].
    """
    model = scene.model
    is_fixed = np.zeros(model.nbody, bool)
    is_fixed[body] = True
    for other in range(body + 1, model.nbody):  # parents come before their children
        is_fixed[other] = is_fixed[model.body_parentid[other]] and not model.body_jntnum[other]
    geoms = [geom for geom in solid_geoms(model, body) if is_fixed[model.geom_bodyid[geom]]]
    return np.concatenate([_points(scene, geom) for geom in geoms])


def obstacle_points(scene: Scene, without: Collection[str] = ()) -> np.ndarray:
    """Return points on every object and fixture of the task except the named ones and tables,
    float64 [N, 3].
    """
    names = [
        name
        for name in (*scene.domain.objects_dict, *scene.domain.fixtures_dict)
        if name not in without
    ]
    return surface_points(
        scene, [root_body(scene, name) for name in names if name in scene.domain.obj_body_id]
    )


def solid_geoms(model: Any, body: int) -> list[int]:
    """Return the ids of the geoms of `body` and of all bodies attached to it that can touch
    something.
    """
    is_below = np.zeros(model.nbody, bool)
    is_below[body] = True
    for other in range(body + 1, model.nbody):  # parents come before their children
        is_below[other] = is_below[model.body_parentid[other]]
    is_solid = (model.geom_contype > 0) | (model.geom_conaffinity > 0)
    return [int(geom) for geom in np.flatnonzero(is_below[model.geom_bodyid] & is_solid)]


def _corners(scene: Scene, geom: int) -> np.ndarray:
    return _placed(scene, geom, _SIGNS)


def _points(scene: Scene, geom: int) -> np.ndarray:
    half = scene.model.geom_aabb[geom, 3:]
    counts = np.maximum(np.ceil(2 * half / _SPACING_M).astype(int), 1) + 1
    grid = np.stack(
        np.meshgrid(*(np.linspace(-1, 1, count) for count in counts), indexing="ij"), -1
    ).reshape(-1, 3)
    return _placed(scene, geom, grid[(np.abs(grid) == 1.0).any(1)])


def _placed(scene: Scene, geom: int, unit: np.ndarray) -> np.ndarray:
    """Transform points of the cube from -1 to 1 to the geom's bounding box."""
    box = scene.model.geom_aabb[geom]
    rotation = scene.data.geom_xmat[geom].reshape(3, 3)
    return np.asarray(scene.data.geom_xpos[geom] + (box[:3] + unit * box[3:]) @ rotation.T)


def rotation_vector(rotation: np.ndarray) -> np.ndarray:
    """Return axis times angle (rad) of a rotation matrix, for angles below a half turn."""
    axis = np.array(
        [
            rotation[2, 1] - rotation[1, 2],
            rotation[0, 2] - rotation[2, 0],
            rotation[1, 0] - rotation[0, 1],
        ]
    )
    sine = np.linalg.norm(axis) / 2
    if sine < 1e-9:
        return np.zeros(3)
    return np.asarray(axis / (2 * sine) * np.arctan2(sine, (np.trace(rotation) - 1) / 2))
