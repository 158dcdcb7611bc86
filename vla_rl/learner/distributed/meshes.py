"""The ranks as meshes: who has other rows, who shares layers, and everyone.

    tensor_parallel = 2            all: everything outside of the layers that are cut
        rank 0   rank 1            rows: ranks 0 and 2, ranks 1 and 3; FSDP of cut layers
        rank 2   rank 3            tensor: ranks 0 and 1, ranks 2 and 3; same rows, other heads

Without tensor parallelism, `rows` is `all`.
"""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vla_rl.learner.config import LearnerConfig


class Meshes:
    """The meshes of one group of ranks; each rank makes them once, at the same time.

    Args:
        config: number of ranks, and what each holds.
        device: kind of device, such as `cpu`.
    """

    def __init__(self, config: LearnerConfig, device: str) -> None:
        self.tensor_size = config.tensor_parallel
        """Number of ranks that share layers."""

        self.tensor: DeviceMesh | None = None
        """This rank's tensor group; None without tensor parallelism."""

        # replicas: a second dimension of size 1, over which nothing is shared
        over = ("replicas", "shards") if config.shard == "replicas" else ("rows",)
        ones = (1,) * (len(over) - 1)
        if self.tensor_size == 1:
            self.all = init_device_mesh(device, (config.ranks, *ones), mesh_dim_names=over)
            self.rows = self.all
            return
        sizes = (config.row_groups, *ones, self.tensor_size)
        mesh = init_device_mesh(device, sizes, mesh_dim_names=(*over, "tensor"))
        self.rows, self.tensor = mesh[over], mesh["tensor"]
        if config.shard == "replicas":
            # not (ranks, 1): FSDP2 divides gradients twice if shards are not shared (torch 2.13)
            self.all = mesh["replicas", "tensor"]
        else:
            self.all = init_device_mesh(device, (config.ranks,), mesh_dim_names=("ranks",))
