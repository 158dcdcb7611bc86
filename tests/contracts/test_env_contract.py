"""Every registered environment keeps the rules of `vla_rl.testing`.

LIBERO and Meta-World are tested too if they are installed, LIBERO with the assets that an
environment finds by itself.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from vla_rl.envs import LIBERO_SUITES, METAWORLD_SUITES
from vla_rl.envs.libero.assets import find_assets
from vla_rl.envs.metaworld.scene import load_metaworld
from vla_rl.testing import EmbodiedEnvContract, EnvContract
from vla_rl.testing.envs import Env
from vla_rl.types import EnvSpec

SUPPORT = Path(__file__).parent / "support"

TOY = EnvSpec(id="vla_rl/toy_reach-v0", kwargs={"render_mode": "rgb_array"})
FAULTLESS = EnvSpec(
    id="vla_rl/faulty-v0", kwargs={"fault": "raise", "times": 0, "render_mode": "rgb_array"}
)
LIBERO = EnvSpec(
    id="vla_rl/libero_goal-v0",
    kwargs={"task_id": 3, "image_size": 64, "quality": "fast", "num_settle_steps": 1},
)
DRIVING, WAYPOINTS, DRIVING_CONTROL = (
    EnvSpec(id=f"vla_rl/driving{way}-v0", kwargs={"render_mode": "rgb_array", "image_size": 64})
    for way in ("", "_waypoints", "_control")
)
METAWORLD = EnvSpec(
    id="vla_rl/metaworld_mt10-v0",
    kwargs={"task_id": "drawer-open", "image_size": 64, "quality": "fast"},
)
CONTROL = EnvSpec(id="vla_rl/control-v0", kwargs={"env_id": "Pendulum-v1"})

NEEDING_MORE = {"vla_rl/navsim-v0", "vla_rl/bench2drive-v0"}
"""Environments that need files or a server from outside; their own tests hold them."""

EMBODIED = [TOY, FAULTLESS, DRIVING, WAYPOINTS, DRIVING_CONTROL, LIBERO, METAWORLD]


class TestToy(EmbodiedEnvContract):
    spec = TOY

    def test_success_terminates(self) -> None:
        env = self.make_env()
        env.reset(seed=0)
        terminated = truncated = False
        while not (terminated or truncated):
            action = env.unwrapped.optimal_action()  # type: ignore[attr-defined]
            _, reward, terminated, truncated, info = env.step(action)
        assert (terminated, truncated, reward, info["is_success"]) == (True, False, 1.0, True)


class TestFaultyWithoutFaults(EmbodiedEnvContract):
    spec = FAULTLESS


class TestDriving(EmbodiedEnvContract):
    spec = DRIVING


class OtherDrives(EmbodiedEnvContract):
    """In the suite, one of three kinds of action stands for a drive in other processes."""

    @pytest.mark.proof
    def test_it_runs_the_same_episode_in_a_process_of_its_own(self, env: Env) -> None:
        super().test_it_runs_the_same_episode_in_a_process_of_its_own(env)

    @pytest.mark.proof
    def test_it_runs_the_same_episode_beside_another_in_one_process(self, env: Env) -> None:
        super().test_it_runs_the_same_episode_beside_another_in_one_process(env)


class TestWaypoints(OtherDrives):
    spec = WAYPOINTS


class TestDrivingControl(OtherDrives):
    spec = DRIVING_CONTROL


class Drawing(EmbodiedEnvContract):
    """In the suite, envs/libero/test_env.py compares another process of LIBERO's with this one, and
    the test of vector modes below does so for Meta-World.
    """

    shares_process = False

    @pytest.mark.proof
    def test_it_runs_the_same_episode_in_a_process_of_its_own(self, env: Env) -> None:
        super().test_it_runs_the_same_episode_in_a_process_of_its_own(env)


class TestLibero(Drawing):
    spec = LIBERO

    def make_env(self, **options: Any) -> Env:
        require_simulator(LIBERO)
        return super().make_env(**options)


class TestMetaWorld(Drawing):
    spec = METAWORLD

    def make_env(self, **options: Any) -> Env:
        require_simulator(METAWORLD)
        return super().make_env(**options)


@pytest.mark.filterwarnings("ignore:.*Box (action|observation) space:UserWarning")
class TestControl(EnvContract):
    """Without an image, so that it keeps the rules of any environment."""

    spec = CONTROL


def require_simulator(spec: EnvSpec) -> None:
    """Skip the test if the simulator of this environment is not installed."""
    if spec is LIBERO:
        try:
            find_assets(None)
        except (FileNotFoundError, ImportError) as error:
            pytest.skip(f"LIBERO cannot run here: {str(error).split('. ')[0]}")
    if spec is METAWORLD:
        try:
            load_metaworld()
        except ImportError as error:
            pytest.skip(str(error))


# in the suite, Meta-World stands for simulators that draw: LIBERO builds its scene five times; and
# one of three kinds of action for a drive
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(
            each,
            marks=pytest.mark.proof if each in (LIBERO, WAYPOINTS, DRIVING_CONTROL) else (),
        )
        for each in EMBODIED
    ],
    ids=lambda spec: spec.id,
)
def test_every_vector_mode_runs_the_same_episodes_none_hangs_and_none_imports_torch(
    spec: EnvSpec,
) -> None:
    require_simulator(spec)
    kwargs = {**spec.kwargs, "assets": "stand-ins"} if spec is LIBERO else spec.kwargs
    # one, because each Meta-World costs a second in each mode;
    # test_a_state_restored_in_another_instance_goes_on_alike has two that draw in one process, and
    # the proofs of the next test have two in each mode
    assert_equal_in_every_mode(spec.id, kwargs, "fork", num_envs=1 if spec is METAWORLD else 2)


@pytest.mark.parametrize(
    "env_id",
    [
        pytest.param(env_id, marks=() if env_id == CONTROL.id else pytest.mark.proof)
        for env_id in sorted(gymnasium.registry)
        if env_id.startswith("vla_rl/") and env_id not in NEEDING_MORE
    ],
)
def test_every_id_runs_the_same_episode_however_its_processes_are_started(env_id: str) -> None:
    assert_equal_in_every_mode(env_id, small(env_id), "fork,spawn,forkserver")


def small(env_id: str) -> dict[str, Any]:
    """The keywords with which an environment of any id is small."""
    suite = {"suite": f"{env_id[7:-3]}_mt10" if "metaworld" in env_id else "libero_goal"}
    named: dict[str, Any] = suite if env_id in ("vla_rl/libero-v0", "vla_rl/metaworld-v0") else {}
    if env_id == "vla_rl/libero_request-v0":
        named = {"request": "turn on the stove", "goals": ["turnon flat_stove_1"]}
    for family, spec in (("metaworld", METAWORLD), ("libero", LIBERO)):
        if family in env_id:
            placeholders = {"assets": "stand-ins"} if spec is LIBERO else {}
            return {**spec.kwargs, **placeholders, **named}
    return next(spec.kwargs for spec in [*EMBODIED, CONTROL] if spec.id == env_id)


def assert_equal_in_every_mode(
    env_id: str, kwargs: dict[str, Any], contexts: str, num_envs: int = 2
) -> None:
    command = [
        sys.executable,
        str(SUPPORT / "vector_modes.py"),
        env_id,
        json.dumps(kwargs),
        contexts,
        str(num_envs),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == "torch imported: False"
    modes = dict(line.split() for line in lines)
    assert list(modes) == [*contexts.split(","), "ours", "sync"]
    assert len(set(modes.values())) == 1


def test_importing_the_environments_imports_no_simulator() -> None:
    code = (
        "import sys, gymnasium, vla_rl.envs\n"
        "assert not {'mujoco', 'robosuite', 'libero', 'metaworld', 'torch', 'cv2'} & set(sys.modules), 'a "
        "simulator was imported'\n"
        f"assert all(f'vla_rl/{{suite}}-v0' in gymnasium.registry for suite in {LIBERO_SUITES!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_registered_environment_is_held_to_the_contract() -> None:
    ids = {env_id for env_id in gymnasium.registry if env_id.startswith("vla_rl/")}
    suites = {
        f"vla_rl/{suite}{kind}-v0"
        for suite in (*LIBERO_SUITES, *METAWORLD_SUITES)
        for kind in ("", "-expert")
    }
    # control tasks have no image, so their own tests hold them; an expert's environment is the
    # suite's with one key more
    assert ids == {
        *NEEDING_MORE,
        CONTROL.id,
        TOY.id,
        FAULTLESS.id,
        *(spec.id for spec in (DRIVING, WAYPOINTS, DRIVING_CONTROL)),
        "vla_rl/libero-v0",
        "vla_rl/libero_request-v0",
        "vla_rl/metaworld-v0",
        *suites,
    }


@pytest.mark.parametrize(
    ("env_id", "named"),
    [
        (CONTROL.id, r'env_id is missing.*env_id="CartPole-v1"'),
        (FAULTLESS.id, "fault is '', expected one of raise,"),
        ("vla_rl/navsim-v0", "folder is missing"),
        ("vla_rl/bench2drive-v0", r'expected lists of at least one: servers=\["127.0.0.1:5700"\]'),
        ("vla_rl/libero-v0", "suite is '', expected one of libero_spatial"),
        ("vla_rl/libero_request-v0", "request or goals are missing"),
    ],
)
def test_an_environment_that_is_made_without_what_it_needs_says_what_it_needs(
    env_id: str, named: str
) -> None:
    if env_id == "vla_rl/libero-v0":
        pytest.importorskip("libero")
    with pytest.raises(ValueError, match=named):
        gymnasium.make(env_id)


@pytest.mark.parametrize("spec", [TOY, DRIVING, WAYPOINTS], ids=lambda spec: spec.id)
@pytest.mark.parametrize(
    ("state", "named"),
    [
        (None, "the state is a NoneType, expected the dict that get_state returned"),
        ({"rng": "{}"}, r"the state has no .*is_over, .*expected one that get_state returned"),
    ],
)
def test_a_state_of_another_environment_is_refused_and_changes_nothing(
    spec: EnvSpec, state: Any, named: str
) -> None:
    env: Any = gymnasium.make(spec.id, **spec.kwargs).unwrapped
    env.reset(seed=3)
    before = env.get_state()
    with pytest.raises(ValueError, match=named):
        env.set_state(state)
    assert repr(env.get_state()) == repr(before)
    env.close()
