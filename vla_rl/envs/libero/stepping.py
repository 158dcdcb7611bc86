"""The control step of one scene, as one compiled call on live views of MuJoCo's arrays.

Nothing here calls robosuite's `step`: `control_step` computes the same numbers. robosuite's objects
are read once, after a scene was built, for the controller's state at the reset and the joints'
addresses.
"""

import contextlib
import fcntl
import functools
import importlib
import math
import time
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import numpy as np

from vla_rl.envs.libero.loading import load_simulator
from vla_rl.envs.mujoco.loading import cache_folder
from vla_rl.errors import EnvError

Physics: TypeAlias = Literal["exact", "fast"]
"""exact: robosuite's bits. fast: one constraint solve a substep, sparse matrices, no inverses;
equal up to rounding."""

_DISPLACEMENT_M, _ROTATION_RAD = 0.05, 0.5
_MODEL_FIELDS = ("site_rgba",)
_SMALLEST_SINE = 1e-8
"""Largest value that `np.isclose` treats as zero in robosuite's test."""


@functools.cache
def _compiled_code() -> tuple[Any, Any]:
    """Return the modules of the compiled code: imported late, because `load_simulator` sets the
    folder of compiled code.
    """
    load_simulator()
    names = ("control_step", "mujoco_calls")
    code, calls = [importlib.import_module(f"vla_rl.envs.libero.{name}") for name in names]
    return code, calls


class Stepper:
    """Steps one scene. Its state besides MuJoCo's is the controller, the gripper and the clock of
    the sensors.

    Args:
        env: robosuite's environment, just reset.
    """

    def __init__(self, env: Any) -> None:
        self._code, calls = _compiled_code()
        self._simulator = load_simulator()
        self._quaternion, self._rotation = self._simulator.axisangle2quat, self._simulator.quat2mat
        robot, model, data = env.robots[0], env.sim.model._model, env.sim.data._data
        # The arrays are views of MuJoCo's memory, which is freed with this object.
        self._keep_alive = env.sim
        self._functions = calls.mujoco_functions(self._simulator.mujoco)
        self._addresses = (model._address, data._address, int(robot.eef_site_id))
        self._live = self._code.Poses(
            **{
                name: getattr(model if name in _MODEL_FIELDS else data, name)
                for name in self._code.Poses._fields
            }
        )
        self._read = self._code.Poses(*(array.copy() for array in self._live))
        self._simulation = self._make_simulation(env)
        self._controller = self._code.ControllerState(
            *(
                np.array(getattr(robot.controller, name))
                for name in self._code.ControllerState._fields
            )
        )
        # whether the controller has read the pose, and the two fingers' commands
        self._flags = np.zeros(3)
        self._clock = np.zeros(2)
        self._eef_body, self._fingers = (
            self._body(model, robot.robot_model.eef_name),
            robot._ref_gripper_joint_pos_indexes,
        )
        self.copy_reset_state(env)

    def copy_reset_state(self, env: Any) -> None:
        """Copy the state of the controller and the gripper from robosuite's environment after its
        reset, and read the sensors.

        A forced reading advances robosuite's sensor clock by a substep; a reset makes one.
        """
        robot = env.robots[0]
        for name, array in self._controller._asdict().items():
            array[...] = getattr(robot.controller, name)
        self._flags[:] = (
            float(robot.controller.new_update),
            *np.broadcast_to(robot.gripper.current_action, (2,)),
        )
        self._clock[:] = 0.0, 0.0
        self.read_sensors()

    def read_sensors(self) -> None:
        """Read the sensors outside of a step."""
        self._clock[0] += self._code.SUBSTEP_S
        call_compiled(self._code.read_sensors, self._live, self._read)
        self._clock[1] = 1.0

    def run_control_step(self, action: np.ndarray, physics: Physics) -> None:
        """Run one control step with float64 [7] in [-1, 1]."""
        rotation = action[3:6] * _ROTATION_RAD
        command = self._code.Command(
            action[:3] * _DISPLACEMENT_M,
            # robosuite's own functions, the second of which rounds to float32.
            self._rotation(self._quaternion(rotation)),
            bool(rotation.any()),
            float(np.sign(action[6])),
        )
        call_compiled(
            self._code.run_control_step,
            self._functions,
            *self._addresses,
            physics == "exact",
            self._live,
            self._simulation,
            self._controller,
            self._flags,
            self._clock,
            self._read,
            command,
        )

    @property
    def proprio(self) -> np.ndarray:
        """The sensors' last values, float32 [8]: gripper position (m), hand orientation
        (axis-angle), two fingers (m).
        """
        read = self._read
        # MuJoCo's quaternions begin with w, and robosuite's end with it.
        w, x, y, z = read.xquat[self._eef_body]
        hand = axis_angle(np.array([x, y, z, w]))
        parts = (read.site_xpos[self._addresses[2]], hand, read.qpos[self._fingers])
        return np.asarray(np.concatenate(parts), np.float32)

    @property
    def last_poses(self) -> Any:
        """`Poses` of the sensors' last reading; overwritten by the next step."""
        return self._read

    def get_state(self) -> dict[str, Any]:
        """Return all state besides MuJoCo's own that a later step depends on, as plain arrays."""
        return {
            "controller": {
                name: array.copy() for name, array in self._controller._asdict().items()
            },
            "flags": self._flags.copy(),
            "clock": self._clock.copy(),
            "read": {name: array.copy() for name, array in self._read._asdict().items()},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state that `get_state` returned for the same task."""
        for name, array in self._controller._asdict().items():
            array[...] = state["controller"][name]
        for name, array in self._read._asdict().items():
            array[...] = state["read"][name]
        self._flags[:], self._clock[:] = state["flags"], state["clock"]

    def _make_simulation(self, env: Any) -> Any:
        robot, model, data = env.robots[0], env.sim.model._model, env.sim.data._data
        arm = list(range(self._code.NUM_JOINTS))
        indices = (
            robot.controller.qpos_index,
            robot.controller.qvel_index,
            robot._ref_joint_actuator_indexes,
        )
        if any(list(each) != arm for each in indices):
            raise ValueError(
                f"the arm's joints and motors are at {indices}, expected the first "
                f"{len(arm)} of each."
            )
        fingers = np.array(
            [env.sim.model.actuator_name2id(name) for name in robot.gripper.actuators]
        )
        return self._code.Simulation(
            qvel=data.qvel,
            qM=data.qM,
            qfrc_bias=data.qfrc_bias,
            ctrl=data.ctrl,
            torque_limits=model.actuator_ctrlrange[arm],
            gripper_ctrl=fingers,
            gripper_range=model.actuator_ctrlrange[fingers],
            mass_address=_mass_addresses(model, len(arm)),
            jacobian=np.zeros((2, 3, model.nv)),
        )

    def _body(self, model: Any, name: str) -> int:
        return int(
            self._simulator.mujoco.mj_name2id(model, self._simulator.mujoco.mjtObj.mjOBJ_BODY, name)
        )


def _mass_addresses(model: Any, size: int) -> np.ndarray:
    """Return the address of each mass matrix entry (i, j) in MuJoCo's packed `qM`, int64 [size,
    size]; -1 for a zero.

    A row of `qM` begins at `dof_Madr` with the diagonal and continues with the joint's ancestors,
    nearest first.
    """
    addresses = np.full((size, size), -1, np.int64)
    for row in range(size):
        column, address = row, int(model.dof_Madr[row])
        while column >= 0:
            addresses[row, column] = addresses[column, row] = address
            column, address = int(model.dof_parentid[column]), address + 1
    return addresses


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Return axis times angle in [0, 2 pi] of a unit quaternion (x, y, z, w), float64 [3].

    Zero without rotation.
    """
    w = min(max(float(quaternion[3]), -1.0), 1.0)
    sine = math.sqrt(1.0 - w * w)
    if sine <= _SMALLEST_SINE:
        return np.zeros(3)
    return np.asarray(quaternion[:3] * 2.0 * np.arccos(w) / sine)


COMPILE_WAIT_S = 120.0
"""Longest wait for a process that compiles (s); after that a process compiles for itself."""


def call_compiled(function: Any, *arguments: Any) -> Any:
    """Call a function of numba's; its first call in a process holds the lock of all processes.

    The first process on a machine compiles for half a minute and keeps the code on disk. Those
    that start at the same time wait, and read that code instead of compiling it too.
    """
    if not hasattr(function, "overloads"):
        raise EnvError(
            "NUMBA_DISABLE_JIT is set, expected numba to compile LIBERO's control steps; unset it."
        )
    # Compiled or read in this process already.
    if function.overloads:
        return function(*arguments)
    with _hold_compile_lock():
        return function(*arguments)


@contextlib.contextmanager
def _hold_compile_lock() -> Iterator[None]:
    with (cache_folder() / "compiling.lock").open("w", encoding="utf-8") as lock:
        deadline = time.monotonic() + COMPILE_WAIT_S
        # the kernel frees the lock of a killed process; a stopped one keeps it
        while not _try_lock(lock.fileno()) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
