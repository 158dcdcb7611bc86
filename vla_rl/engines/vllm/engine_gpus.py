"""The GPUs of the engines of one process, each of which has some of its own. Pure.

8 GPUs, tensor_parallel_size 2 ─► 4 engines: 0,1  2,3  4,5  6,7
"""

from collections.abc import Sequence

from msgspec.structs import replace

from vla_rl.engines.config import EngineConfig
from vla_rl.engines.vllm.config import VllmConfig
from vla_rl.errors import ConfigError


def spread_over(config: EngineConfig, gpus: Sequence[str]) -> EngineConfig:
    """Return the settings with as many engines as the GPUs hold; unchanged without GPUs.

    Raises: ConfigError with the inequality if one engine needs more GPUs than there are.
    """
    size = config.vllm.tensor_parallel_size
    if not gpus:
        return config
    if size > len(gpus):
        raise ConfigError(
            f"engine.vllm.tensor_parallel_size={size} > {len(gpus)} GPUs of this host, so that no "
            "engine would fit; lower it, or take a host with more GPUs"
        )
    return replace(config, vllm=replace(config.vllm, num_engines=len(gpus) // size))


def engine_gpus(config: VllmConfig, gpus: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the GPUs of each engine; empty for one that sees those of its process."""
    size = config.tensor_parallel_size
    return [tuple(gpus[k * size : (k + 1) * size]) for k in range(config.num_engines)]
