"""LIBERO's assets as an environment finds them without `VLA_RL_LIBERO_ASSETS`, which the tests set
to the stand-ins.
"""

import os

import pytest

from vla_rl.envs.libero.assets import ASSETS_VARIABLE, STAND_INS, Assets, find_assets


def installed_assets() -> Assets:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get(ASSETS_VARIABLE) == STAND_INS:
            patch.delenv(ASSETS_VARIABLE)
        return find_assets()
