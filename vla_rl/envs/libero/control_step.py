"""One control step of 50 ms, compiled: 25 substeps of physics, each with the controller's torques,
in one call.

robosuite computes a substep as forward, (controller's update:) forward, torques, step. The
positions and velocities are the same in all three, so they are computed once here; but in MuJoCo
3.3 every constraint solve moves the warm start of the next one, so the exact mode keeps the two
solves that robosuite throws away.

    exact:  step1, solve, solve, torques, step2         the second solve belongs to the controller's update
    fast:   step1,               torques, step2

robosuite's sensor clock sets the substep at which the sensors read: poses and pictures are those of
that instant.
"""

from typing import NamedTuple

import numpy as np

from vla_rl.envs.libero.mujoco_calls import call_forward_skip, call_jac_site, call_step, compiled
from vla_rl.envs.libero.operational_space import NUM_JOINTS, exact_torques, fast_torques

NUM_SUBSTEPS = 25
SUBSTEP_S = 0.002
SAMPLING_PERIOD_S = 1.0 / 20
GRIPPER_SPEED = 0.01
_AFTER_VELOCITIES = 2
"""`mjSTAGE_VEL`: skip the computations that depend on positions and velocities only."""


class Poses(NamedTuple):
    """Values that the sensors read: arrays of `MjData`, live or recorded."""

    qpos: np.ndarray
    site_xpos: np.ndarray
    site_xmat: np.ndarray
    xquat: np.ndarray
    geom_xpos: np.ndarray
    geom_xmat: np.ndarray
    cam_xpos: np.ndarray
    cam_xmat: np.ndarray
    light_xpos: np.ndarray
    light_xdir: np.ndarray
    site_rgba: np.ndarray
    """The model's site colours: a lit burner is a visible site."""


class Simulation(NamedTuple):
    """Live arrays of MuJoCo's data and model."""

    qvel: np.ndarray
    qM: np.ndarray
    qfrc_bias: np.ndarray
    ctrl: np.ndarray
    torque_limits: np.ndarray
    """[7, 2]"""

    gripper_ctrl: np.ndarray
    """int64 [2], the two fingers' indices in `ctrl`."""

    gripper_range: np.ndarray
    """[2, 2], lowest and highest control of each finger."""

    mass_address: np.ndarray
    """int64 [7, 7], address of the arm's M[i, j] in `qM`; -1 for an exact zero."""

    jacobian: np.ndarray
    """[2, 3, nv] C, scratch."""


class Command(NamedTuple):
    """An action in the controller's units."""

    displacement: np.ndarray
    """[3] (m)."""

    rotation: np.ndarray
    """[3, 3] C, the requested turn."""

    turns: bool
    """False keeps the previous target orientation."""

    gripper: float
    """-1 opens, 1 closes, 0 stays."""


@compiled
def update_controller(functions, model, data, site, poses, simulation, c):  # type: ignore[no-untyped-def]
    """Update the controller with the arm's current state."""
    jacobian = simulation.jacobian
    call_jac_site(
        functions.jac_site,
        model,
        data,
        jacobian[0].ctypes.data,
        jacobian[1].ctypes.data,
        np.int32(site),
    )
    c.ee_pos[:] = poses.site_xpos[site]
    c.ee_ori_mat[:] = poses.site_xmat[site].reshape((3, 3))
    c.ee_pos_vel[:] = np.dot(jacobian[0], simulation.qvel)
    c.ee_ori_vel[:] = np.dot(jacobian[1], simulation.qvel)
    c.joint_pos[:] = poses.qpos[:NUM_JOINTS]
    c.joint_vel[:] = simulation.qvel[:NUM_JOINTS]
    for joint in range(NUM_JOINTS):
        for axis in range(3):
            c.J_pos[axis, joint] = c.J_full[axis, joint] = jacobian[0, axis, joint]
            c.J_ori[axis, joint] = c.J_full[3 + axis, joint] = jacobian[1, axis, joint]
        for other in range(NUM_JOINTS):
            address = simulation.mass_address[joint, other]
            c.mass_matrix[joint, other] = simulation.qM[address] if address >= 0 else 0.0


@compiled
def set_goal(c, command):  # type: ignore[no-untyped-def]
    """Set the hand's goal at the end of the control step, relative to its current pose."""
    if command.turns:
        c.goal_ori[:] = np.dot(command.rotation, c.ee_ori_mat)
    c.goal_pos[:] = c.ee_pos + command.displacement


@compiled
def _apply(simulation, torques, gripper, direction):  # type: ignore[no-untyped-def]
    """Write the controls: clipped torques, and the fingers' next positions."""
    for joint in range(NUM_JOINTS):
        low, high = simulation.torque_limits[joint]
        simulation.ctrl[joint] = min(max(torques[joint], low), high)
    for finger in range(2):
        side = -1.0 if finger == 0 else 1.0
        gripper[finger] = min(max(gripper[finger] + side * GRIPPER_SPEED * direction, -1.0), 1.0)
        low, high = simulation.gripper_range[finger]
        simulation.ctrl[simulation.gripper_ctrl[finger]] = (
            0.5 * (high + low) + 0.5 * (high - low) * gripper[finger]
        )


@compiled
def read_sensors(live, read):  # type: ignore[no-untyped-def]
    """Copy the sensors' current values."""
    read.qpos[:] = live.qpos
    read.site_xpos[:] = live.site_xpos
    read.site_xmat[:] = live.site_xmat
    read.xquat[:] = live.xquat
    read.geom_xpos[:] = live.geom_xpos
    read.geom_xmat[:] = live.geom_xmat
    read.cam_xpos[:] = live.cam_xpos
    read.cam_xmat[:] = live.cam_xmat
    read.light_xpos[:] = live.light_xpos
    read.light_xdir[:] = live.light_xdir
    read.site_rgba[:] = live.site_rgba


@compiled
def tick(clock, live, read):  # type: ignore[no-untyped-def]
    """Advance robosuite's sensor clock (seconds since its last sample, has it sampled) by one
    substep.
    """
    clock[0] += SUBSTEP_S
    if clock[1] == 0.0 and clock[0] <= SAMPLING_PERIOD_S:
        read_sensors(live, read)
        clock[1] = 1.0
    if clock[0] >= SAMPLING_PERIOD_S:
        clock[0] %= SAMPLING_PERIOD_S
        clock[1] = 0.0


@compiled
def run_control_step(  # type: ignore[no-untyped-def]
    functions, model, data, site, is_exact, poses, simulation, c, flags, clock, read, command
):
    """Run one control step.

    Args:
        functions: `MujocoFunctions`; model, data: addresses of `mjModel` and `mjData`; site: the
            hand's site.
        is_exact: compute robosuite's bits, or else one solve for each substep.
        poses, simulation: live arrays; c: the `ControllerState`; read: the sensors' last values.
        flags: float64 [3], written: whether the controller needs an update (not in the first
            substep after a reset, where robosuite's acts on its values from the reset), and the
            closing command of each finger, in [-1, 1].
        clock: float64 [2], see `tick`.
        command: the action.
    """
    velocities, without_sensors = np.int32(_AFTER_VELOCITIES), np.int32(1)
    for substep in range(NUM_SUBSTEPS):
        call_step(functions.step1, model, data)
        if is_exact:
            call_forward_skip(functions.forward_skip, model, data, velocities, without_sensors)
        if flags[0] != 0.0:
            if is_exact:
                call_forward_skip(functions.forward_skip, model, data, velocities, without_sensors)
            update_controller(functions, model, data, site, poses, simulation, c)
        if substep == 0:
            set_goal(c, command)
        bias = simulation.qfrc_bias[:NUM_JOINTS]
        torques = exact_torques(c, bias) if is_exact else fast_torques(c, bias)
        flags[0] = 1.0
        _apply(simulation, torques, flags[1:], command.gripper)
        call_step(functions.step2, model, data)
        tick(clock, poses, read)
