"""The launch of an engine: its folder, arguments, environment variables, GPUs.

8 GPUs, tensor_parallel_size 2 ─► 4 engines: 0,1  2,3  4,5  6,7
"""

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from vla_rl.engines.config import EngineConfig, VllmConfig
from vla_rl.engines.vllm.adapter import PLUGIN, require_vllm
from vla_rl.engines.vllm.preload.sitecustomize import PARENT
from vla_rl.engines.vllm.served import EngineLayout
from vla_rl.errors import ConfigError
from vla_rl.util.ownership import OwnedFolder, remove_abandoned_folders
from vla_rl.util.processes import overlay_environment

TRANSFER_BACKEND: Final = "vla_rl"
"""vLLM's name for the transfer of weights through shared memory of ours."""

TRANSFER_CLASS: Final = ("vla_rl.engines.vllm.worker_extension", "StagedTransfer")

WORKER_EXTENSION: Final = "vla_rl.engines.vllm.worker_extension.WorkerExtension"

LOGITS_PROCESSOR: Final = "vla_rl.engines.vllm.worker_extension:GreedyTemperature"

CPU_HEAD_SIZES: Final = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Attention head sizes that the CPU kernels of vLLM 0.32 support; with others, its process
crashes."""


def require_head_kernels(layout: EngineLayout) -> None:
    """Raise ConfigError if a CPU build of vLLM would crash on the model's attention."""
    trunk = layout.config.get("text_config", layout.config)
    head_size = trunk.get("head_dim") or trunk["hidden_size"] // trunk["num_attention_heads"]
    if head_size not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"engine 'vllm' has no CPU kernel for attention heads of {head_size} numbers, expected "
            f"one of {', '.join(map(str, CPU_HEAD_SIZES))}; take engine 'torch', or a policy with "
            "other heads"
        )


def require_shareable(layout: EngineLayout, size: int) -> None:
    """Raise ConfigError if several GPUs cannot share the layers of a policy's engine."""
    if size == 1:
        return
    if layout.num_tokens is not None:
        raise ConfigError(
            f"engine.vllm.tensor_parallel_size is {size}, expected 1 for a policy over actions: its "
            "engine reads whole rows of the output head; take more engines"
        )
    heads = {
        name: layout.config[name]
        for name in ("num_attention_heads", "num_key_value_heads")
        if name in layout.config
    }
    for name, number in heads.items():
        if number % size:
            raise ConfigError(
                f"engine.vllm.tensor_parallel_size is {size}, which does not divide the policy's "
                f"{name} = {number}; expected a divisor of {' and '.join(map(str, heads.values()))}"
            )


def write_folder(folder: Path, layout: EngineLayout) -> None:
    """Write a checkpoint folder without weights, which come from the learner."""
    (folder / "config.json").write_bytes(msgspec.json.encode(layout.config))
    for name, data in layout.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def engine_arguments(
    folder: Path, layout: EngineLayout, config: VllmConfig, *, build: str, dtype: str
) -> dict[str, Any]:
    """Return the arguments of vLLM's `AsyncEngineArgs`.

    Args:
        folder: folder that `write_folder` filled.
        layout: layout of the policy.
        config: configuration of the engine.
        build: build of the installed vLLM, `cpu` or `cuda`.
        dtype: data type of the weights, such as `float32`.
    """
    arguments = {
        "model": str(folder),
        "runner": layout.runner,
        "dtype": dtype,
        "load_format": "dummy",  # the learner's weights are applied before the first answer
        # a text engine needs the tokenizer for grammars and stop texts; action engines have none
        "skip_tokenizer_init": layout.num_tokens is not None,
        "max_model_len": layout.context_size,
        # a request has to fit in one step: its seed would not survive a split prompt
        "max_num_batched_tokens": max(layout.context_size, config.max_step_tokens),
        "enable_chunked_prefill": False,
        "enable_prefix_caching": layout.reuses_prefixes,
        "max_num_seqs": config.max_requests,
        "enforce_eager": build == "cpu" or layout.runner == "pooling",
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_log_stats": True,
        "seed": 0,
    }
    if layout.features:
        arguments |= _feature_arguments(layout)
    if layout.num_tokens is None:
        # the learner computes grammar masks with the same library
        arguments |= {"structured_outputs_config": {"backend": "guidance"}}
    if layout.runner == "generate":
        arguments |= {
            "logprobs_mode": "processed_logprobs",
            "logits_processors": [LOGITS_PROCESSOR],
        }
    if config.tensor_parallel_size > 1:
        arguments |= {
            "tensor_parallel_size": config.tensor_parallel_size,
            "distributed_executor_backend": "mp",
        }
    elif build == "cpu":
        arguments["distributed_executor_backend"] = "uni"
    if build != "cpu":
        arguments |= {
            "gpu_memory_utilization": config.gpu_memory_share,
            "enable_sleep_mode": config.can_sleep,
        }
    return arguments


def _feature_arguments(layout: EngineLayout) -> dict[str, Any]:
    """Return the arguments of an engine whose requests have images besides their tokens."""
    return {
        # 0 for what no request has: vLLM would measure the memory of the longest video
        "limit_mm_per_prompt": {"video": 0, layout.features: layout.max_features},
        "mm_processor_cache_gb": 0,
        # its default needs the package blake3, whose lack shows at the first image only
        "mm_hasher_algorithm": "sha256",
        # the client sends the pixels that the learner reads, which are normalised already
        "mm_device_do_normalize": False,
    }


_PREFIX: Final = "vla_rl_vllm_"
_LONGEST: Final = 107 - len("/123e4567-e89b-12d3-a456-426614174000")
"""Longest folder path, in characters, with which the paths of vLLM's sockets in it are short enough
for Linux."""


@contextmanager
def engine_folder() -> Iterator[Path]:
    """Make a folder that only this user may enter, and remove it at the end.

    Also removes folders of killed processes.

    Raises: ConfigError if its path is too long for sockets.
    """
    # A killed process cannot remove its folder, and its engines are killed with it.
    remove_abandoned_folders(_PREFIX)
    folder = OwnedFolder(_PREFIX)
    try:
        if (length := len(str(folder.path))) > _LONGEST:
            raise ConfigError(
                f"the engines' sockets would lie in {folder.path}, a path of {length} characters, "
                f"expected at most {_LONGEST}; set TMPDIR to a shorter one"
            )
        yield folder.path
    finally:
        folder.remove_folder()


def spread_engines(config: EngineConfig, gpus: Sequence[str]) -> EngineConfig:
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


def assign_gpus(config: VllmConfig, gpus: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the GPUs of each engine; empty for one that sees those of its process."""
    size = config.tensor_parallel_size
    return [tuple(gpus[k * size : (k + 1) * size]) for k in range(config.num_engines)]


STARTUP_PATH: Final = Path(__file__).parent / "preload"
"""Folder that comes first on the PYTHONPATH of engine processes."""

_SET_BY_VLLM: Final = (
    "AITER_",
    "GOMP_",
    "KMP_",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NCCL_",
    "NUMEXPR_MAX_THREADS",
    "OMP_",
    "PROMETHEUS_MULTIPROC_DIR",
    "PYTORCH_",
    "RAY_",
    "TILELANG_",
    "TORCHINDUCTOR_",
    "TRITON_",
    "VLLM_",
)
"""Prefixes of the environment variables that vLLM sets in this process while it builds an
engine."""


def engine_environment(
    folder: Path, config: VllmConfig, gpus: tuple[str, ...] = ()
) -> AbstractContextManager[None]:
    """Set the environment variables of an engine, which its processes inherit.

    They are restored afterwards.

    Variables that vLLM sets itself are restored too, such as an LD_PRELOAD of torch's libraries,
    which every simulator would load; processes that a runtime starts meanwhile do not get it
    either.

    Args:
        folder: folder of the sockets through which vLLM's processes communicate.
        config: settings of the engine.
        gpus: ids of its own GPUs; empty: those that this process sees.
    """
    build, _ = require_vllm()
    values = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(config.num_threads),
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(STARTUP_PATH), os.environ.get("PYTHONPATH", "")])
        ),
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        PARENT: str(os.getpid()),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(config.startup_s)),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": PLUGIN,
        "VLLM_RPC_BASE_PATH": str(folder),
        # this process has threads, which do not survive a fork
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if build == "cpu":
        values |= {
            "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request waits seconds for a compiler
            "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        if config.tensor_parallel_size > 1:
            # otherwise vLLM wants a NUMA node for each worker
            values["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    else:
        kernels = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
        values |= {
            # shared, so that kernels are compiled once: an engine's own temporary folder is removed
            # with it
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", kernels),
            "VLLM_USE_V2_MODEL_RUNNER": "0",
        }
        if gpus:
            values["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return overlay_environment(values, _SET_BY_VLLM)
