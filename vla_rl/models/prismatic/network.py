"""What every Prismatic network is built of: fused vision towers, their projector, and a Llama."""

from collections.abc import Iterable

from torch import Tensor, nn

from vla_rl.models.prismatic.config import PrismaticConfig
from vla_rl.models.prismatic.lora import adapter_of
from vla_rl.models.prismatic.trunk import build_trunk
from vla_rl.models.prismatic.vision import FusedVisionBackbone, Projector, build_tower


class PrismaticNetwork(nn.Module):
    """The parts under the names that the public checkpoints give them; families say how they are put together.

    Args:
        config: of towers and trunk.
        is_causal: whether the trunk looks back only.
    """

    def __init__(self, config: PrismaticConfig, *, is_causal: bool) -> None:
        super().__init__()
        self.vision_backbone = FusedVisionBackbone(
            *(
                build_tower(tower.timm_id, config.image_size, tower.overrides)
                for tower in (config.featurizer, config.fused_featurizer)
            ),
            pixels=config.pixels,
        )
        self.projector = Projector(self.vision_backbone.width, config.llm.hidden_size)
        self.language_model = build_trunk(config.llm, is_causal=is_causal)

    def head_logits(self, hidden: Tensor, ids: slice) -> Tensor:
        """Logits of the token ids in `ids` for the trunk's output [..., D]; no other row of the head is computed."""
        head = self.language_model.lm_head
        logits: Tensor = hidden @ head.weight[ids].T
        adapter = adapter_of(head)
        if adapter is not None:
            logits = logits + adapter.scale * (hidden @ adapter.down.T @ adapter.up[ids].T)
        return logits

    def block_stacks(self) -> tuple[Iterable[nn.Module], ...]:
        """The blocks of both towers and of the trunk, each stack from its first to its last."""
        towers = (self.vision_backbone.featurizer, self.vision_backbone.fused_featurizer)
        return (*(tower.blocks for tower in towers), self.language_model.model.layers)
