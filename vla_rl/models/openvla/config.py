"""The configuration of an OpenVLA policy, which generates one action token after the other."""

from vla_rl.models.prismatic.config import PrismaticConfig
from vla_rl.models.prismatic.dialects import Vocabulary


class OpenVlaConfig(PrismaticConfig, frozen=True, kw_only=True):
    """OpenVLA (Kim et al. 2024, arXiv:2406.09246): one control step for each decision, one token
    for each dimension.
    """

    vocabulary: Vocabulary = "all"
    """Token ids over which an action token's probability is normalised, in rollout and training
    alike: `all`, as OpenVLA's authors and SimpleVLA-RL sample, or those of the `actions` alone, as
    RLinf does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            len(self.cameras) == 1, "cameras", "one camera: OpenVLA was trained on one image"
        )

    @property
    def chunk_size(self) -> int:
        """Control steps of one decision."""
        return 1
