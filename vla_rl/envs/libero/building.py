"""Building one task's robosuite environment without cameras, as it stands after LIBERO's `seed` and `reset`, in one go.

robosuite builds the model when the environment is made, places the objects, and does both again at the reset. The
construction comes before the seed, so what counts of it is only that it was there. Here the construction loads the model
and stops; the seeded placement follows on that model, with the very computations of a reset.
"""

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vla_rl.envs.libero.assets import missing_asset
from vla_rl.envs.libero.simulator import load_simulator
from vla_rl.envs.libero.tasks import Task
from vla_rl.errors import EnvError

_PLACEMENT_ATTEMPTS = 50

T = TypeVar("T")


def build_robosuite_env(task: Task, assets: Path, scene_seed: int) -> Any:
    """robosuite's environment right after its seeded reset, its sensors taken out.

    Raises: `FileNotFoundError` naming an asset that is missing; `EnvError` if the objects find no place.
    """
    load_simulator().libero._assets_path_cache = str(assets)
    with seeded(scene_seed), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return retry_placement(lambda: _loaded_and_placed(task))
        except FileNotFoundError as error:
            raise missing_asset(assets, f"{task.key} needs {error.filename}") from error
        except ValueError as error:
            if "file" in str(error) and str(assets) in str(error):
                raise missing_asset(assets, f"{task.key}: {error}") from error
            raise


def _loaded_and_placed(task: Task) -> Any:
    """The environment as robosuite's own reset leaves it; random numbers are drawn in the order of that reset."""
    with _construction_that_only_loads():
        control = load_simulator().control_env(
            bddl_file_name=str(task.goal_file), has_offscreen_renderer=False, use_camera_obs=False, ignore_done=True
        )
    env = control.env
    # robosuite would load the model twice by now, and LIBERO keeps the samplers of joints of every load: each draws
    env.object_property_initializers = [*env.object_property_initializers, *env.object_property_initializers]
    env._reset_internal()
    env.sim.forward()
    env.visualize(vis_settings=dict.fromkeys(env._visualizations, False))
    return env


@contextlib.contextmanager
def _construction_that_only_loads() -> Iterator[None]:
    """Have LIBERO make environments of classes that place nothing and make no sensors while they are constructed."""
    mapping = load_simulator().task_mapping
    before = dict(mapping)
    mapping.update({name: _only_loading(base) for name, base in before.items()})
    try:
        yield
    finally:
        mapping.update(before)


def _only_loading(base: Any) -> Any:
    """A class like `base`, under the same name, by which LIBERO checks that the goal file is for it."""

    def initialize_sim(self: Any, xml_string: str | None = None) -> None:
        """As where robosuite draws: making its render context computes a forward pass more on a new model.

        The pass moves the solver's warm start, and with it the last bits of what follows.
        """
        base._initialize_sim(self, xml_string)
        self.sim.forward()

    def reset_internal(self: Any) -> None:
        if self.is_constructed:
            base._reset_internal(self)

    def setup_observables(self: Any) -> OrderedDict[str, Any]:
        self.is_constructed = True
        return OrderedDict()

    members = {
        "is_constructed": False,
        "_initialize_sim": initialize_sim,
        "_reset_internal": reset_internal,
        "_setup_observables": setup_observables,
    }
    return type(base)(base.__name__, (base,), members)


def retry_placement(attempt: Callable[[], T]) -> T:
    """Try again where the random placement of objects found no room; any other error surfaces at once."""
    for _ in range(_PLACEMENT_ATTEMPTS):
        with contextlib.suppress(load_simulator().randomization_error):
            return attempt()
    raise EnvError(f"the objects found no place in {_PLACEMENT_ATTEMPTS} attempts; choose another scene_seed.")


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """LIBERO draws from NumPy's global generator: seed it, and give it back as it was."""
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)
