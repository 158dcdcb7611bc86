"""LIBERO's own assets, as their packages bring them: every number and pixel is robosuite's."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vla_rl.envs.libero import LiberoEnv

SUPPORT = Path(__file__).parent / "support"
SUITE, TASK_ID, INIT_STATE_ID = "libero_goal", 7, 11


# test_stepping.py compares the same with stand-ins, which build in a third of the time
@pytest.mark.proof
def test_pictures_and_physics_on_liberos_own_assets_equal_robosuites_bit_by_bit(
    real_assets: str, tmp_path: Path
) -> None:
    rows = np.random.default_rng(4).uniform(-1, 1, (5, 7)).astype(np.float32)
    np.save(tmp_path / "actions.npy", rows)
    play = {
        "name": "real",
        "suite": SUITE,
        "task_id": TASK_ID,
        "init_state_id": INIT_STATE_ID,
        "assets": real_assets,
        "actions": str(tmp_path / "actions.npy"),
        "has_images": True,
    }
    (tmp_path / "plays.json").write_text(json.dumps([play]))
    command = [sys.executable, str(SUPPORT / "robosuite_reference.py")]
    done = subprocess.run(
        [*command, str(tmp_path / "plays.json"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    theirs = np.load(tmp_path / "out.npz")
    env = LiberoEnv(SUITE, TASK_ID, assets=real_assets, image_size=96)
    try:
        ours = [env.reset(options={"init_state_id": INIT_STATE_ID})[0]]
        ours += [env.step(row)[0] for row in rows]
        np.testing.assert_array_equal(env.scene.get_state()["physics"], theirs["real_physics"][-1])
    finally:
        env.close()
    for key in ("state", "image", "wrist_image"):
        np.testing.assert_array_equal([seen[key] for seen in ours], theirs[f"real_{key}"])
