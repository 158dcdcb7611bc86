"""One control step of 50 ms, compiled: 25 substeps of physics, each with the controller's torques.

robosuite computes a substep as forward, (controller's update:) forward, torques, step. The
positions and velocities are the same in all three, so they are computed once here; but in MuJoCo
3.3 every constraint solve moves the warm start of the next one, so the exact mode keeps the two
solves that robosuite throws away.

    exact:  step1, solve, solve, torques, step2         the second solve belongs to the controller's update
    fast:   step1,               torques, step2

robosuite's sensor clock sets the substep at which the sensors read: poses and images are those of
that instant.

The torques are those of operational space control (Khatib 1987), from the errors of the hand:

    F       = kp * position error - kd * linear velocity          tau_F = lambda_p F
    T       = kp * orientation error - kd * angular velocity      tau_T = lambda_r T
    x       = 10 (q0 - q) - 2 sqrt(10) q'                         posture, in the null space of the hand's task
    torques = J^T (lambda_p F, lambda_r T) + gravity compensation + N^T M x

with lambda = (J M^-1 J^T)^-1 for the whole Jacobian J and for its position and rotation rows, and
N = I - M^-1 J^T lambda J. `exact_torques` performs robosuite's operations one by one, on arrays in
robosuite's memory order, because LAPACK and BLAS round differently in another; its results are bit
for bit the same. `fast_torques` solves the same equations by Cholesky's factorisation, and uses
M^-1 M x = x, so that no inverse is formed.
"""

from typing import NamedTuple

import numpy as np

from vla_rl.envs.libero.mujoco_calls import call_forward_skip, call_jac_site, call_step, compiled

NUM_SUBSTEPS = 25
SUBSTEP_S = 0.002
# robosuite's sensors sample at 20 Hz, on the first substep after their timer wraps.
SAMPLING_PERIOD_S = 1.0 / 20
# A substep's travel, whatever the size of the command: closing the open hand takes 8 control steps.
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
    """An action in the controller's units.

    Example:
        Command(displacement=np.array([0.05, 0.0, 0.0]), rotation=np.eye(3), turns=False, gripper=-1.0)
    """

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
    # robosuite keeps the previous goal orientation if no turn is asked for, so that a first action
    # without rotation keeps that of the reset.
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
    # After a reset and the initial state, which force a reading each, this is substep 23 of 0 to
    # 24. One substep later, the gripper's position differs by 0.7 mm and images by pixels.
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
        # In the first substep after a reset, robosuite's controller acts on the pose of the reset,
        # not on that of the initial state.
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


NUM_JOINTS = 7
# LIBERO's gains; the damping is critical.
KP = 150.0
KD = 2 * np.sqrt(KP)


class ControllerState(NamedTuple):
    """State of the controller; float64 arrays, written in place. "F" and "C" are their memory
    orders.
    """

    goal_pos: np.ndarray
    """[3], target position of the hand (m, world)."""

    goal_ori: np.ndarray
    """[3, 3] C, target orientation of the hand."""

    ee_pos: np.ndarray
    ee_ori_mat: np.ndarray
    """[3] and [3, 3] C: current position and orientation of the hand."""

    ee_pos_vel: np.ndarray
    ee_ori_vel: np.ndarray
    """[3] (m/s) and [3] (rad/s)."""

    joint_pos: np.ndarray
    joint_vel: np.ndarray
    initial_joint: np.ndarray
    """[7] (rad, rad/s); the posture towards which the null space is driven."""

    J_pos: np.ndarray
    J_ori: np.ndarray
    J_full: np.ndarray
    """[3, 7] F, [3, 7] F, [6, 7] F: Jacobian of the hand."""

    mass_matrix: np.ndarray
    """[7, 7] F."""


@compiled
def orientation_error(desired, current):  # type: ignore[no-untyped-def]  # compiled: types come with the arguments
    """Return the rotation [3] from `current` to `desired` for small angles, axis times angle."""
    return 0.5 * (
        np.cross(current[0:3, 0], desired[0:3, 0])
        + np.cross(current[0:3, 1], desired[0:3, 1])
        + np.cross(current[0:3, 2], desired[0:3, 2])
    )


@compiled
def exact_torques(c, bias):  # type: ignore[no-untyped-def]
    """Return the torques, float64 [7], bit for bit as robosuite's
    `OperationalSpaceController.run_controller`.

    Args:
        c: a `ControllerState`.
        bias: [7], current gravity, Coriolis and centrifugal torques.
    """
    force = (c.goal_pos - c.ee_pos) * KP + (-c.ee_pos_vel) * KD
    torque = orientation_error(c.goal_ori, c.ee_ori_mat) * KP + (-c.ee_ori_vel) * KD

    # robosuite's operations in its order, on arrays in Fortran's memory order: in C's, the joints
    # were 1e-13 apart after 200 steps.
    mass_inv = np.linalg.inv(c.mass_matrix)
    # Three pseudo-inverses by SVD are the price of equal bits: control takes 20 us a substep, and
    # 10 us by Cholesky's factorisation.
    lambda_full = np.linalg.pinv(np.dot(np.dot(c.J_full, mass_inv), c.J_full.transpose()))
    lambda_pos = np.linalg.pinv(np.dot(np.dot(c.J_pos, mass_inv), c.J_pos.transpose()))
    lambda_ori = np.linalg.pinv(np.dot(np.dot(c.J_ori, mass_inv), c.J_ori.transpose()))
    j_bar = np.dot(mass_inv, c.J_full.transpose()).dot(lambda_full)
    nullspace = np.eye(NUM_JOINTS, NUM_JOINTS) - np.dot(j_bar, c.J_full)

    wrench = np.concatenate((np.dot(lambda_pos, force), np.dot(lambda_ori, torque)))
    torques = np.dot(c.J_full.T, wrench) + bias
    damping = np.sqrt(10) * 2
    posture = np.dot(c.mass_matrix, (10 * (c.initial_joint - c.joint_pos) - damping * c.joint_vel))
    return torques + np.dot(nullspace.transpose(), posture)


@compiled
def _factorise(matrix):  # type: ignore[no-untyped-def]
    """Write Cholesky's L over the lower triangle of a small symmetric matrix: matrix = L L^T."""
    size = matrix.shape[0]
    for row in range(size):
        for column in range(row + 1):
            value = matrix[row, column]
            for k in range(column):
                value -= matrix[row, k] * matrix[column, k]
            matrix[row, column] = (
                np.sqrt(value) if row == column else value / matrix[column, column]
            )


@compiled
def _solve(factor, vector):  # type: ignore[no-untyped-def]
    """Overwrite `vector` with the solution of L L^T y = vector, for the L of `_factorise`."""
    size = factor.shape[0]
    for row in range(size):
        value = vector[row]
        for k in range(row):
            value -= factor[row, k] * vector[k]
        vector[row] = value / factor[row, row]
    for row in range(size - 1, -1, -1):
        value = vector[row]
        for k in range(row + 1, size):
            value -= factor[k, row] * vector[k]
        vector[row] = value / factor[row, row]


@compiled
def _inverse_inertia_at_hand(c):  # type: ignore[no-untyped-def]
    """Return J M^-1 J^T, [6, 6], as W^T W with L W = J^T and M = L L^T."""
    factor = c.mass_matrix.copy()
    _factorise(factor)
    half = np.empty((6, NUM_JOINTS))
    for axis in range(6):
        for row in range(NUM_JOINTS):
            value = c.J_full[axis, row]
            for k in range(row):
                value -= factor[row, k] * half[axis, k]
            half[axis, row] = value / factor[row, row]
    inertia = np.empty((6, 6))
    for row in range(6):
        for column in range(row + 1):
            value = 0.0
            for k in range(NUM_JOINTS):
                value += half[row, k] * half[column, k]
            inertia[row, column] = inertia[column, row] = value
    return inertia


@compiled
def fast_torques(c, bias):  # type: ignore[no-untyped-def]
    """Return the torques, float64 [7]; equal to `exact_torques` up to rounding."""
    wrench, rotation_error = np.empty(6), orientation_error(c.goal_ori, c.ee_ori_mat)
    for axis in range(3):
        wrench[axis] = KP * (c.goal_pos[axis] - c.ee_pos[axis]) - KD * c.ee_pos_vel[axis]
        wrench[3 + axis] = KP * rotation_error[axis] - KD * c.ee_ori_vel[axis]
    inertia = _inverse_inertia_at_hand(c)
    linear, angular = inertia[:3, :3].copy(), inertia[3:, 3:].copy()
    _factorise(linear)
    _factorise(angular)
    _factorise(inertia)
    _solve(linear, wrench[:3])
    _solve(angular, wrench[3:])

    damping = 2 * np.sqrt(10.0)
    posture, at_hand = np.empty(NUM_JOINTS), np.zeros(6)
    for joint in range(NUM_JOINTS):
        posture[joint] = (
            10.0 * (c.initial_joint[joint] - c.joint_pos[joint]) - damping * c.joint_vel[joint]
        )
        for axis in range(6):
            at_hand[axis] += c.J_full[axis, joint] * posture[joint]
    _solve(inertia, at_hand)
    torques = np.empty(NUM_JOINTS)
    for joint in range(NUM_JOINTS):
        value = bias[joint]
        for axis in range(6):
            value += c.J_full[axis, joint] * (wrench[axis] - at_hand[axis])
        for other in range(NUM_JOINTS):
            value += c.mass_matrix[joint, other] * posture[other]
        torques[joint] = value
    return torques
