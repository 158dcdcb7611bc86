"""Draw one small image, here or in a fork: `python -m vla_rl.cli.doctor.drawing here|fork`.

A program of its own, because a driver that fails may hang or take the process with it.
"""

import os
import signal
import sys
import time
from typing import Final

SCENE: Final = """<mujoco><worldbody><light pos="0 0 3"/><geom type="box" size=".3 .3 .3" rgba="1 0 0 1"/>
<camera name="eye" pos="0 -2 0" xyaxes="1 0 0 0 0 1"/></worldbody></mujoco>"""

FORK_S: Final = 6.0
"""Time limit of a fork's image. One whose driver lacks its threads waits for ever."""


def draw() -> None:
    """Draw a red box. Raises: RuntimeError if the image has one colour only."""
    from vla_rl.envs.mujoco.loading import choose_graphics

    backend = choose_graphics()
    # after the choice, because mujoco reads MUJOCO_GL when it is imported
    import mujoco

    model = mujoco.MjModel.from_xml_string(SCENE)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    renderer = mujoco.Renderer(model, 64, 64)
    try:
        renderer.update_scene(data, camera="eye")
        image = renderer.render()
    finally:
        renderer.close()
    if image.max() == image.min():
        raise RuntimeError(f"{backend} drew an image of one colour ({image.max()})")
    print(backend, flush=True)


def draw_in_fork() -> int:
    """Fork as the simulators' server does, before any image, and draw there; return the status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            draw()
            status = 0
        except Exception as error:  # the fork must not run the parent's code
            print(error, file=sys.stderr, flush=True)
        os._exit(status)
    until = time.monotonic() + FORK_S
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print(f"the fork drew nothing within {FORK_S:.0f} s", file=sys.stderr)
    return 1


if __name__ == "__main__":
    if sys.argv[1] == "fork":
        sys.exit(abs(draw_in_fork()))
    draw()
