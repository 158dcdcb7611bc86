"""Base of every Prismatic network: fused vision towers, their projector, and a Llama."""

from collections.abc import Iterable

from torch import Tensor, nn

from vla_rl.models.prismatic.config import PrismaticConfig
from vla_rl.models.prismatic.lora import adapter_of
from vla_rl.models.prismatic.trunk import build_trunk
from vla_rl.models.prismatic.vision import FusedVisionBackbone, Projector, build_tower


class PrismaticNetwork(nn.Module):
    """The parts under the public checkpoints' names; each family defines how they are combined.

    Args:
        config: configuration of towers and trunk.
        is_causal: whether the trunk's attention is causal.
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
        """Return the logits of the token ids in `ids` for the trunk's output [..., D]; other rows
        of the head are not computed.
        """
        head = self.language_model.lm_head
        logits: Tensor = hidden @ head.weight[ids].T
        adapter = adapter_of(head)
        if adapter is not None:
            logits = logits + adapter.scale * (hidden @ adapter.down.T @ adapter.up[ids].T)
        return logits

    def block_stacks(self) -> tuple[Iterable[nn.Module], ...]:
        """Return the blocks of both towers and of the trunk, each stack from its first to
        its last.
        """
        towers = (self.vision_backbone.featurizer, self.vision_backbone.fused_featurizer)
        return (*(tower.blocks for tower in towers), self.language_model.model.layers)
