"""Networks with as few blocks as have all kinds of them: for tests whose time is in the number of
blocks.
"""

import msgspec

from vla_rl.models.openvla_oft import OpenVlaOftConfig
from vla_rl.models.prismatic.config import VisionTowerConfig


def shallow(config: OpenVlaOftConfig) -> OpenVlaOftConfig:
    """Return the configuration with two blocks in each stack."""
    return msgspec.structs.replace(
        config,
        llm=msgspec.structs.replace(config.llm, num_layers=2),
        featurizer=_with_two_blocks(config.featurizer),
        fused_featurizer=_with_two_blocks(config.fused_featurizer),
    )


def _with_two_blocks(tower: VisionTowerConfig) -> VisionTowerConfig:
    return msgspec.structs.replace(tower, overrides={**tower.overrides, "depth": 2})
