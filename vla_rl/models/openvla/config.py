"""The configuration of an OpenVLA policy, which speaks one action token after the other."""

from typing import Literal

from vla_rl.models.prismatic.config import PrismaticConfig


class OpenVlaConfig(PrismaticConfig, frozen=True, kw_only=True):
    """OpenVLA (Kim et al. 2024, arXiv:2406.09246): one control step a decision, one token a dimension."""

    vocabulary: Literal["all", "actions"] = "all"
    """Over which tokens probabilities are normalised: `all` as the reference samples, or the action tokens alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(len(self.cameras) == 1, "cameras", "one camera: OpenVLA was trained on one image")

    @property
    def chunk_size(self) -> int:
        """Control steps of one decision."""
        return 1
