"""One decision a recorded scene: a 4 s trajectory that NavSim's score grades."""

from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import cv2
import numpy as np

from vla_rl.envs.driving.observing import (
    FRONT,
    INSTRUCTIONS,
    check_cameras,
    get_camera_key,
    make_observation_space,
)
from vla_rl.envs.driving.one_decision import KEPT_SCENES, OneDecisionEnv
from vla_rl.envs.driving.plan_actions import NUM_WAYPOINTS, PlanAction
from vla_rl.envs.driving.roads import COMMANDS
from vla_rl.envs.driving.scores import Scene, Version
from vla_rl.envs.driving.scores.geometry import Floats
from vla_rl.envs.driving.scores.navsim import (
    RecordedScene,
    list_recorded,
    read_recorded,
)
from vla_rl.envs.driving.scores.scene import AX, AY, STEER, VX, VY, YAW_RATE
from vla_rl.types import Observation

_EGO: Final = [VX, VY, AX, AY, YAW_RATE, STEER]


class PreparedRecording(NamedTuple):
    """A recorded scene and its observation."""

    scene: Scene
    observation: Observation

    def get_scene(self, version: Version) -> Scene:
        """Return the scene; every version grades the same one."""
        return self.scene

    def observe_after(self, motion: Floats) -> Observation:
        """Return the first observation: no camera was where the motion ends."""
        return self.observation


class NavsimEnv(OneDecisionEnv[PreparedRecording]):
    """Plan 4 s of driving in a recorded scene, and be graded by PDMS or EPDMS.

    Observation: as `OpenLoopDrivingEnv`'s, without `route`, which NavSim does not give; the same
        until the end, because no camera was where the graded motion leads.
    Action, reward, ends, info, randomness: as `OneDecisionEnv`'s.

    Args:
        folder: scenes that `export_scenes.py` wrote; scene k is its k-th file by name.
        version, reward, success_score, step_limit, action, also: as `OneDecisionEnv`'s.
        cameras: NavSim's names; cam_f0 is always among them. The export must have their images.
        image_size: side in pixels that images are resized to.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  # as gymnasium declares it

    def __init__(
        self,
        folder: str = "",
        version: Version = "epdms_v2",
        reward: str = "total",
        success_score: float = 0.9,
        cameras: tuple[str, ...] = (FRONT,),
        image_size: int = 224,
        step_limit: int = NUM_WAYPOINTS,
        action: PlanAction = "moves",
        also: tuple[Version, ...] = (),
    ) -> None:
        if action == "along_route":
            raise ValueError(
                "action is 'along_route', but NavSim gives no route, expected moves or profiles."
            )
        if not folder:
            raise ValueError(
                "folder is missing, expected the folder of scene files that export_scenes.py wrote."
            )
        self._files = list_recorded(Path(folder))
        self._cameras, self._size = check_cameras(tuple(cameras)), image_size
        space = make_observation_space(
            map(get_camera_key, self._cameras), image_size, route_points=None
        )
        super().__init__(
            len(self._files), space, version, reward, success_score, step_limit, action, also
        )

    def _prepare(self, number: int) -> PreparedRecording:
        return _prepare_recording(self._files[number], self._cameras, self._size)


@lru_cache(maxsize=KEPT_SCENES)
def _prepare_recording(file: Path, cameras: tuple[str, ...], size: int) -> PreparedRecording:
    recorded = read_recorded(file)
    return PreparedRecording(recorded.scene, observe(recorded, cameras, size))


def observe(recorded: RecordedScene, cameras: tuple[str, ...], size: int) -> Observation:
    """Return what the policy sees of a recorded scene.

    Raises: ValueError naming the scene, if it lacks a camera or an image cannot be read.
    """
    observation: Observation = {
        get_camera_key(camera): _read_image(recorded, camera, size) for camera in cameras
    }
    command = recorded.command.astype(np.float32)
    ego = recorded.scene.start[_EGO].astype(np.float32)
    observation["state"] = np.concatenate([ego, command])
    observation["command"] = command
    observation["instruction"] = INSTRUCTIONS[COMMANDS[int(command.argmax())]]
    return observation


def _read_image(recorded: RecordedScene, camera: str, size: int) -> np.ndarray:
    file = recorded.images.get(camera)
    if file is None:
        raise ValueError(
            f"scene {recorded.token} has no image of {camera}, only of "
            f"{', '.join(recorded.images) or 'no camera'}; export it with --cameras {camera}."
        )
    image = cv2.imread(str(file), cv2.IMREAD_COLOR)
    if image is None:
        raise ValueError(f"{file} of scene {recorded.token} is missing or no image; export again.")
    # averages over areas: recorded images are many times larger, and single samples of them alias
    resized = cv2.resize(image, (size, size), interpolation=cv2.INTER_AREA)
    return np.ascontiguousarray(resized[..., ::-1])
