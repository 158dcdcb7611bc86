"""Build one task's robosuite environment without cameras, and the scenes of LIBERO's resets.

robosuite builds the model and places the objects on construction, and again at every reset.
LIBERO's evaluations seed once, after the construction, and reset before each trial, so that trial k
has the random numbers of the k-th reset. Here the model is built once, and robosuite's own reset
code places the objects. Before each placement the model is restored to its newly built state, so
that the same random numbers follow.
"""

import contextlib
import importlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vla_rl.envs.libero.assets import missing_asset
from vla_rl.envs.libero.built_models import built_model
from vla_rl.envs.libero.goal_files import check_goal_file
from vla_rl.envs.libero.libero_code import load_libero
from vla_rl.envs.libero.simulator import load_simulator
from vla_rl.envs.libero.tasks import Task
from vla_rl.errors import EnvError, VlaRlError
from vla_rl.util.agreement import excerpt

_PLACEMENT_ATTEMPTS = 50
_LOADS_BEFORE_A_START = 2
"""Number of models that LIBERO has loaded by the end of its first reset. It keeps the samplers of
doors, drawers and knobs of all of them, and each draws random numbers. Drawn starts
(`drawn_starts`) have this many, whatever was reset before.
"""

_PLACED_FIELDS = ("body_pos", "body_quat", "site_rgba")
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
        self.env = _loaded(task, assets)
        """The environment, in the state that robosuite's reset leaves, after the first
        `advance`."""

        mujoco, model, data = (
            load_simulator().mujoco,
            self.env.sim.model._model,
            self.env.sim.data._data,
        )
        # robosuite runs one more forward pass when it makes a render context; each pass moves the
        # solver's warm start, and with it the last bits of what follows
        mujoco.mj_forward(model, data)
        self._new_model = {name: getattr(model, name).copy() for name in _PLACED_FIELDS}
        self._new_state = np.empty(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION))
        mujoco.mj_getState(model, data, self._new_state, mujoco.mjtState.mjSTATE_INTEGRATION)
        self._joint_samplers, self._num_loads = list(self.env.object_property_initializers), 1
        with seeded(seed):
            self._random_state = np.random.get_state()

    def advance(self) -> None:
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
        env.object_property_initializers = self._joint_samplers * self._num_loads
        env._reset_internal()
        env.sim.forward()
        env.visualize(vis_settings=dict.fromkeys(env._visualizations, False))


def _loaded(task: Task, assets: Path) -> Any:
    code = load_libero(task.package)
    code.use_assets(assets)
    check_goal_file(task.goal_file, code.predicates)
    # LIBERO-plus reads camera, joints and noise from the name of the file; no file of that name has
    # to exist
    named = task.goal_file.with_name(f"{task.name}.bddl")
    options = {"has_offscreen_renderer": False, "use_camera_obs": False, "ignore_done": True}
    with _construction_that_only_loads(code.wrapper), _without_deprecation_warnings():
        try:
            return code.wrapper.ControlEnv(bddl_file_name=str(named), **options).env
        # "from None": robosuite's traceback would be longer than the screen and say nothing more
        except FileNotFoundError as error:
            detail = f"{task.key} needs {_inside(assets, str(error.filename))}"
            raise missing_asset(assets, detail, task) from None
        except (VlaRlError, ImportError, MemoryError):
            raise
        except Exception as error:  # LIBERO's parsers raise `Exception` itself
            if "Error opening file" in str(error):  # MuJoCo's error for a mesh or a texture
                raise missing_asset(assets, f"{task.key}: {error}", task) from None
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

    def reset_internal(self: Any) -> None:
        if self.is_constructed:
            base._reset_internal(self)

    def setup_observables(self: Any) -> OrderedDict[str, Any]:
        self.is_constructed = True
        return OrderedDict()

    def initialize_sim(self: Any, xml_string: str | None = None) -> None:
        simulation = importlib.import_module("robosuite.utils.binding_utils").MjSim
        build = simulation.from_xml_string
        simulation.from_xml_string = lambda xml: simulation(built_model(xml))
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
