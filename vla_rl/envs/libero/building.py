"""One task's robosuite environment without cameras: its model, LIBERO's resets, further starts.

robosuite builds the model and places the objects on construction, and again at every reset.
LIBERO's evaluations seed once, after the construction, and reset before each trial, so that trial k
has the random numbers of the k-th reset. Here the model is built once, and robosuite's own reset
code places the objects. Before each placement the model is restored to its newly built state, so
that the same random numbers follow.

Built models are kept on disk: MuJoCo needs 0.9 s of a core to build a scene of the placeholder
assets, and 0.1 s to read it. A kept model has every bit of the built one. Scenes of LIBERO's own
assets, 220 MB each, are built every time.

LIBERO's fixed initial states hardly vary (the target of some tasks never moves). `draw_start`
places robot, objects and fixtures anew in the regions of the task's goal file. LIBERO's own
samplers draw these as in its reset, but on an existing scene: the same seed gives the same start,
whatever ran before.
"""

import contextlib
import hashlib
import importlib
import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from vla_rl.envs.libero.assets import missing_asset_error
from vla_rl.envs.libero.loading import load_libero, load_simulator
from vla_rl.envs.libero.task_files import check_goal_file
from vla_rl.envs.libero.tasks import Task
from vla_rl.envs.mujoco.loading import cache_folder
from vla_rl.errors import EnvError, VlaRlError
from vla_rl.util.atomic_files import replacing
from vla_rl.util.values import excerpt

# LIBERO's own reset tries for ever, and swallows every exception on its way.
_PLACEMENT_ATTEMPTS = 50
_LOADS_BEFORE_A_START = 2
"""Number of models that LIBERO has loaded by the end of its first reset. It keeps the samplers of
doors, drawers and knobs of all of them, and each draws random numbers. Drawn starts
(`drawn_starts`) have this many, whatever was reset before.
"""

_POSE_FIELDS = ("body_pos", "body_quat", "site_rgba")
"""Arrays of the model that a reset writes: poses of fixtures, and visibility of markers."""

T = TypeVar("T")


class SeededResets:
    """robosuite's environment of a task, without its sensors, and the resets that follow one
    seeding.

    Args:
        task, assets: the task, and the folder of its meshes and textures.
        seed: seed of LIBERO's random numbers, set once before the first reset.

    Raises: `FileNotFoundError` naming a missing asset or goal file; `ValueError` naming a goal file
    that LIBERO cannot read, its line and what stands there.
    """

    def __init__(self, task: Task, assets: Path, seed: int) -> None:
        self.env = _load_env(task, assets)
        """The environment, in the state that robosuite's reset leaves, after the first
        `run_next_reset`."""

        mujoco, model, data = (
            load_simulator().mujoco,
            self.env.sim.model._model,
            self.env.sim.data._data,
        )
        # robosuite runs one more forward pass when it makes a render context; each pass moves the
        # solver's warm start, and with it the last bits of what follows
        mujoco.mj_forward(model, data)
        self._new_model = {name: getattr(model, name).copy() for name in _POSE_FIELDS}
        self._new_state = np.empty(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION))
        mujoco.mj_getState(model, data, self._new_state, mujoco.mjtState.mjSTATE_INTEGRATION)
        self._joint_samplers, self._num_loads = list(self.env.object_property_initializers), 1
        with seeded(seed):
            self._random_state = np.random.get_state()

    def run_next_reset(self) -> None:
        """Carry out the next reset. Raises: `EnvError` if the objects find no place."""
        with _random_numbers(self._random_state), _without_deprecation_warnings():
            retry_placement(self._reset)
            self._random_state = np.random.get_state()
        self.env.object_property_initializers = self._joint_samplers * _LOADS_BEFORE_A_START

    def _reset(self) -> None:
        env, mujoco = self.env, load_simulator().mujoco
        model, data = env.sim.model._model, env.sim.data._data
        for name, values in self._new_model.items():
            getattr(model, name)[:] = values
        mujoco.mj_resetData(model, data)
        mujoco.mj_setState(model, data, self._new_state, mujoco.mjtState.mjSTATE_INTEGRATION)
        self._num_loads += 1
        # As in LIBERO, whose list grows by these samplers with each model that it loads.
        env.object_property_initializers = self._joint_samplers * self._num_loads
        env._reset_internal()
        env.sim.forward()
        env.visualize(vis_settings=dict.fromkeys(env._visualizations, False))


def _load_env(task: Task, assets: Path) -> Any:
    code = load_libero(task.package)
    code.use_assets(assets)
    check_goal_file(task.goal_file, code.predicates)
    # LIBERO-plus reads camera, joints and noise from the name of the file; no file of that name has
    # to exist
    named = task.goal_file.with_name(f"{task.name}.bddl")
    # A reset with robosuite's renderer takes 1.4 to 2.7 s instead of 0.3 to 0.9, and opens OpenGL,
    # after which the process could not be forked. At its horizon robosuite would raise in the step
    # after the last; the environment counts steps itself.
    options = {"has_offscreen_renderer": False, "use_camera_obs": False, "ignore_done": True}
    with _construction_that_only_loads(code.wrapper), _without_deprecation_warnings():
        try:
            return code.wrapper.ControlEnv(bddl_file_name=str(named), **options).env
        # "from None": robosuite's traceback would be longer than the screen and say nothing more
        except FileNotFoundError as error:
            detail = f"{task.key} needs {_inside(assets, str(error.filename))}"
            raise missing_asset_error(assets, detail, task) from None
        except (VlaRlError, ImportError, MemoryError):
            raise
        except Exception as error:  # LIBERO's parsers raise `Exception` itself
            if "Error opening file" in str(error):  # MuJoCo's error for a mesh or a texture
                raise missing_asset_error(assets, f"{task.key}: {error}", task) from None
            raise unreadable_goal(task, error) from error


def unreadable_goal(
    task: Task, error: Exception, what: str = "no scene can be built"
) -> ValueError:
    """Return the error for a goal file that LIBERO's code fails at."""
    return ValueError(
        f"{task.goal_file} ({task.key}): {what}: LIBERO's code raises {type(error).__name__}"
        f"({', '.join(map(excerpt, error.args))}); compare the file with one of LIBERO's."
    )


def _inside(assets: Path, file: str) -> str:
    """Return the name of a file below the folder of assets, which LIBERO's code may know by a link
    of the name `assets`.
    """
    inside = file.removeprefix(f"{assets}/")
    return inside.rpartition("/assets/")[2]


@contextlib.contextmanager
def _construction_that_only_loads(wrapper: Any) -> Iterator[None]:
    """Make LIBERO construct environments of classes that place nothing and make no sensors during
    construction.
    """
    before = wrapper.TASK_MAPPING
    wrapper.TASK_MAPPING = _OnlyLoading(before)
    try:
        yield
    finally:
        wrapper.TASK_MAPPING = before


class _OnlyLoading(dict[str, Any]):
    """LIBERO's classes of environments by name, each replaced on access."""

    def __getitem__(self, name: str) -> Any:
        return _only_loading(super().__getitem__(name))


def _only_loading(base: Any) -> Any:
    """Return a class like `base`, with the same name, which LIBERO compares with the goal file."""

    # robosuite also resets during the construction, before anything is seeded: placing the objects
    # there would cost a second placement, of random numbers that belong to no trial.
    def reset_internal(self: Any) -> None:
        if self.is_constructed:
            base._reset_internal(self)

    # The sensors' own test draws each camera once, 0.2 s of a construction.
    def setup_observables(self: Any) -> OrderedDict[str, Any]:
        self.is_constructed = True
        return OrderedDict()

    def initialize_sim(self: Any, xml_string: str | None = None) -> None:
        simulation = importlib.import_module("robosuite.utils.binding_utils").MjSim
        build = simulation.from_xml_string
        # robosuite compiles the model from XML here, twice; the copy from the disk has the same
        # bits.
        simulation.from_xml_string = lambda xml: simulation(build_model(xml))
        try:
            base._initialize_sim(self, xml_string)
        finally:
            simulation.from_xml_string = build

    members = {
        "is_constructed": False,
        "_initialize_sim": initialize_sim,
        "_reset_internal": reset_internal,
        "_setup_observables": setup_observables,
    }
    return type(base)(base.__name__, (base,), members)


@contextlib.contextmanager
def _without_deprecation_warnings() -> Iterator[None]:
    """Suppress deprecation warnings; only third-party code runs here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def retry_placement(attempt: Callable[[], T]) -> T:
    """Try again if the random placement of objects found no room.

    Other errors are raised at once.
    """
    for _ in range(_PLACEMENT_ATTEMPTS):
        with contextlib.suppress(load_simulator().randomization_error):
            return attempt()
    raise EnvError(
        f"the objects found no place in {_PLACEMENT_ATTEMPTS} attempts; choose another scene_seed."
    )


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed NumPy's global generator, from which LIBERO draws, and restore it afterwards."""
    with _random_numbers(None):
        # The generator belongs to the whole process: a program around the environment may draw from
        # it too, which is why it is restored.
        np.random.seed(seed)
        yield


@contextlib.contextmanager
def _random_numbers(state: Any) -> Iterator[None]:
    before = np.random.get_state()
    if state is not None:
        np.random.set_state(state)
    try:
        yield
    finally:
        np.random.set_state(before)


_MAX_CACHE_BYTES: Final = 1 << 30
"""Room of all kept models. Those that were not used for longest are removed first."""

_MAX_MODEL_BYTES: Final = 128 << 20
"""Larger models are not kept: a suite of them would fill the room and find nothing there."""

_FILE_ATTRIBUTE: Final = re.compile(r' file\w*="([^"]*)"')


def build_model(xml: str) -> Any:
    """Return MuJoCo's model of this XML: the kept one if neither the XML nor a file that it names
    has changed since, else a new one, which is kept.

    Raises: `ValueError` of MuJoCo.
    """
    mujoco = load_simulator().mujoco
    try:
        kept = _model_folder() / f"{_digest_xml(mujoco.__version__, xml)}.mjb"
    # A file of the scene is missing. MuJoCo's error names it.
    except OSError:
        return mujoco.MjModel.from_xml_string(xml)
    if kept.is_file():
        with contextlib.suppress(ValueError, OSError):
            model = mujoco.MjModel.from_binary_path(str(kept))
            # Not every file system records the last use by itself, and what was used last is
            # removed last.
            os.utime(kept)
            return model
    model = mujoco.MjModel.from_xml_string(xml)
    if mujoco.mj_sizeModel(model) <= _MAX_MODEL_BYTES:
        # A full disk costs time, and no scene.
        with contextlib.suppress(OSError):
            _write_model(mujoco, model, kept)
    return model


def _model_folder() -> Path:
    folder = cache_folder() / "models"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _digest_xml(version: str, xml: str) -> str:
    found = hashlib.sha256(f"{version}\n{xml}".encode())
    # The XML names its meshes and textures. A model from before one of them changed would be drawn
    # for ever.
    for name in sorted(set(_FILE_ATTRIBUTE.findall(xml))):
        status = Path(name).stat()
        found.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return found.hexdigest()[:32]


def _write_model(mujoco: Any, model: Any, path: Path) -> None:
    data = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, data)
    _remove_oldest(path.parent, data.nbytes)
    with replacing(path, path.with_suffix(f".{os.getpid()}.part")) as part:
        part.write_bytes(data.data)


def _remove_oldest(folder: Path, size: int) -> None:
    kept = [(file.stat().st_mtime_ns, file.stat().st_size, file) for file in folder.iterdir()]
    for _, other_size, file in sorted(kept, reverse=True):
        size += other_size
        if size > _MAX_CACHE_BYTES:
            file.unlink(missing_ok=True)


JOINT_NOISE_RAD: Final = 0.02
"""Standard deviation of each of the arm's joints, as in LIBERO's fixed initial states; its own
reset has none."""


def draw_start(env: Any, seed: int) -> None:
    """Draw a start of robosuite's `env` from `seed` and write it into the simulation; poses are not
    computed.

    Raises: EnvError if the objects find no place.
    """
    data = env.sim.data._data
    with seeded(seed):
        for robot in env.robots:
            noise = np.random.randn(len(robot.init_qpos)) * JOINT_NOISE_RAD
            data.qpos[robot._ref_joint_pos_indexes] = robot.init_qpos + noise
        # Doors, drawers and knobs come first, because they belong to fixtures on which things are
        # placed.
        for joint in env.object_property_initializers:
            env.object_states_dict[joint.name].set_joint(joint.sample())
        # things on a fixture need the fixture's pose
        load_simulator().mujoco.mj_step1(env.sim.model._model, data)
        placements = retry_placement(lambda: _sample_placements(env))
    for position, orientation, item in placements.values():
        if item.name in env.fixtures_dict:
            body = env.sim.model.body_name2id(item.root_body)
            env.sim.model.body_pos[body], env.sim.model.body_quat[body] = position, orientation
        else:
            env.sim.data.set_joint_qpos(item.joints[-1], np.concatenate([position, orientation]))
    # The samplers set positions alone; what moved before would go on moving.
    data.qvel[:] = 0.0


def _sample_placements(env: Any) -> dict[str, Any]:
    placements = env.placement_initializer.sample()
    placements = env.conditional_placement_initializer.sample(env.sim, placements)
    found: dict[str, Any] = env.conditional_placement_on_objects_initializer.sample(placements)
    return found
