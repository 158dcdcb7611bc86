"""Operational space control of the arm (Khatib 1987), compiled: hand errors to joint torques, once
for each substep.

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

from vla_rl.envs.libero.mujoco_calls import compiled

NUM_JOINTS = 7
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

    mass_inv = np.linalg.inv(c.mass_matrix)
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
