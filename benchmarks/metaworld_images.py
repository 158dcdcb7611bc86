"""Time of Meta-World's images: `python -m benchmarks.metaworld_images --size 224`.

Draws both cameras of drawer-open after each of some control steps, in each quality. The last line
is JSON: the median time of the two images together, in milliseconds.
"""

import argparse
import json
import time
from typing import get_args

import numpy as np

from vla_rl.envs.metaworld import MetaWorldEnv
from vla_rl.envs.mujoco.drawing_quality import Quality


def image_ms(size: int, quality: Quality, num_steps: int = 12) -> float:
    """Return the median time of drawing both cameras (ms)."""
    env = MetaWorldEnv("metaworld_mt50", "drawer-open", image_size=size, quality=quality)
    env.reset(options={"init_state_id": 3})
    env.render_every_step = False
    times = []
    for _ in range(num_steps):
        env.step(np.full(4, 0.2, np.float32))
        started = time.perf_counter()
        env._draw()
        times.append(time.perf_counter() - started)
    env.close()
    return 1e3 * float(np.median(times))


def main() -> None:
    """Measure both qualities and print the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=224, help="side of the images in pixels")
    size = parser.parse_args().size
    report = {f"{quality}_ms": round(image_ms(size, quality), 1) for quality in get_args(Quality)}
    print(json.dumps({"size": size, **report}))


if __name__ == "__main__":
    main()
