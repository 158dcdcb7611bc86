"""Train a policy from Meta-World's demonstrations:
`python -m vla_rl.recipes.sft_metaworld --demonstrations demos --out base`.

This is `sft_libero` with defaults for another arm: statistics of the data scale its actions of four
numbers, and the last number is an effort between -1 and 1, not a command to open or close.
"""

import sys
from functools import partial
from typing import Literal

from vla_rl.cli.command_line import Launch
from vla_rl.cli.launch import run_recipe
from vla_rl.datasets import DatasetOptions
from vla_rl.recipes.sft_libero import SftLiberoConfig, main


class SftMetaworldConfig(SftLiberoConfig, frozen=True, kw_only=True):
    """Supervised learning of a policy for Meta-World."""

    data: DatasetOptions = DatasetOptions(gripper="none")

    statistics: Literal["policy", "data"] = "data"
    """Statistics that scale actions and proprioception. data: the 1st and 99th percentile of these
    data; policy: the checkpoint's own."""


cli = partial(run_recipe, Launch, SftMetaworldConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
