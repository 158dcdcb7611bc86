"""A thing between the Panda's two finger pads, without the Panda: pads that press, on a hand that
rises.
"""

from typing import Any

import numpy as np

_PRESS_N = 20.0
_PADS = """
<body name="hand" pos="0 0 {grip}">
  <joint name="lift" type="slide" axis="0 0 1"/>
  <geom type="sphere" size="0.01" mass="1" contype="0" conaffinity="0"/>
  <body pos="0.046 0 0"><joint name="right" type="slide" axis="-1 0 0" damping="100"/>{pad}</body>
  <body pos="-0.046 0 0"><joint name="left" type="slide" axis="1 0 0" damping="100"/>{pad}</body>
</body>"""
_PAD = (
    '<geom type="box" size="0.004 0.008 0.008" mass="0.1" friction="2 0.05 0.0001" condim="4" '
    'solref="0.01 0.5"/>'
)
"""robosuite's own finger pad."""


def slip_m(mujoco: Any, model: Any, up: str, fingers_along: str) -> float:
    """How far (m) the thing in `model` slides down between the pads while they rise by 20 cm in 2
    s.

    Args:
        mujoco: the package.
        model: of the thing alone; its collision boxes in group 0 are taken.
        up: which of its axes stands upright.
        fingers_along: which of its axes the pads close along.
    """
    rig = mujoco.MjModel.from_xml_string(_rig(mujoco, model, up, fingers_along))
    data = mujoco.MjData(rig)
    closing = [rig.joint(name).dofadr[0] for name in ("left", "right")]
    data.qfrc_applied[closing] = _PRESS_N
    for _ in range(300):
        mujoco.mj_step(rig, data)
    before = data.body("thing").xpos[2] - data.body("hand").xpos[2]
    for step in range(1000):
        data.ctrl[0] = 0.2 * min(1.0, step / 900)
        mujoco.mj_step(rig, data)
    assert data.body("hand").xpos[2] - rig.body("hand").pos[2] > 0.18
    return float(before - (data.body("thing").xpos[2] - data.body("hand").xpos[2]))


def _rig(mujoco: Any, model: Any, up: str, fingers_along: str) -> str:
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    upright = np.eye(3) if up == "z" else np.array([[1, 0, 0], [0, 0, -1], [0, 1, 0]])
    if fingers_along == "y":
        upright = np.array([[0, 1, 0], [-1, 0, 0], [0, 0, 1]]) @ upright
    volume = model.geom_size[model.geom_group == 0].prod(1).sum()
    geoms, heights = [], []
    for geom in np.flatnonzero(model.geom_group == 0):
        rotation, half = upright @ data.geom_xmat[geom].reshape(3, 3), model.geom_size[geom]
        pos, quat = upright @ data.geom_xpos[geom], np.empty(4)
        mujoco.mju_mat2Quat(quat, rotation.ravel())
        reach = np.abs(rotation[2]) @ half
        heights.append((pos[2] - reach, pos[2] + reach))
        mass = model.body_mass.sum() * half.prod() / volume
        values = {"pos": pos, "quat": quat, "size": half, "friction": model.geom_friction[geom]}
        values |= {"solref": model.geom_solref[geom], "solimp": model.geom_solimp[geom][:3]}
        geoms.append(
            "<geom type='box' "
            f"mass='{mass}' " + " ".join(f"{k}='{_text(v)}'" for k, v in values.items()) + "/>"
        )
    low, high = min(h[0] for h in heights), max(h[1] for h in heights)
    grip = max((low + high) / 2, high - 0.04)
    return f"""<mujoco><option timestep="0.002"/><worldbody>
<geom type="plane" size="1 1 1" pos="0 0 {low}"/>
<body name="thing"><freejoint/>{"".join(geoms)}</body>
{_PADS.format(grip=grip, pad=_PAD)}
</worldbody><actuator><position joint="lift" kp="20000" kv="600"/></actuator></mujoco>"""


def _text(values: np.ndarray) -> str:
    return " ".join(f"{value:.9g}" for value in values)
