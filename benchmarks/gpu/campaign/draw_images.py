"""A process that draws for the stage `rendering`, as a simulator does.

    it writes `ready` and its first image ─► waits for a line ─► draws for its time ─► writes images/s

python -m benchmarks.gpu.campaign.draw_images SECONDS FILE
"""

import sys
import time
from typing import Final

import numpy as np

from vla_rl.envs.mujoco.loading import choose_graphics

SIDE: Final = 224

SCENE: Final = """<mujoco><asset>
<texture name="tiles" type="2d" builtin="checker" rgb1=".2 .3 .4" rgb2=".7 .7 .6" width="256" height="256"/>
<material name="floor" texture="tiles" texrepeat="6 6" reflectance=".2"/></asset><worldbody>
<light pos="1 -1 3" dir="-.3 .3 -1" diffuse=".8 .8 .8"/><geom type="plane" size="3 3 .1" material="floor"/>
<geom type="box" size=".2 .2 .2" pos="-.4 0 .2" rgba="1 0 0 1"/>
<geom type="sphere" size=".25" pos=".3 .2 .25" rgba="0 .6 0 1"/>
<geom type="capsule" size=".1 .3" pos="0 -.5 .4" euler="20 60 0" rgba="0 0 1 1"/>
<camera name="eye" pos="0 -2 1.4" xyaxes="1 0 0 0 .57 .82"/></worldbody></mujoco>"""


def main() -> None:
    """Draw one image into a file, and then as many as the time allows."""
    seconds, file = float(sys.argv[1]), sys.argv[2]
    choose_graphics()
    import mujoco

    model = mujoco.MjModel.from_xml_string(SCENE)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    with mujoco.Renderer(model, SIDE, SIDE) as renderer:
        renderer.update_scene(data, camera="eye")
        np.save(file, renderer.render())
        print("ready", flush=True)
        sys.stdin.readline()
        made, began = 0, time.perf_counter()
        while made == 0 or time.perf_counter() - began < seconds:
            renderer.update_scene(data, camera="eye")
            renderer.render()
            made += 1
        print(made / (time.perf_counter() - began), flush=True)


if __name__ == "__main__":
    main()
