"""The folder and the arguments with which an engine is started."""

from pathlib import Path
from typing import Any, Final

import msgspec

from vla_rl.engines.vllm.config import VllmConfig
from vla_rl.engines.vllm.served import EngineLayout
from vla_rl.errors import ConfigError

TRANSFER_BACKEND: Final = "vla_rl"
"""vLLM's name for the transfer of weights through shared memory of ours."""

TRANSFER_CLASS: Final = ("vla_rl.engines.vllm.transfer", "StagedTransfer")

WORKER_EXTENSION: Final = "vla_rl.engines.vllm.transfer.WorkerExtension"

LOGITS_PROCESSOR: Final = "vla_rl.engines.vllm.greedy:GreedyTemperature"

GREEDY_TEMPERATURE: Final = "greedy_temperature"
"""Key of the `extra_args` of a greedy request, which this processor reads."""

CPU_HEAD_SIZES: Final = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Attention head sizes that the CPU kernels of vLLM 0.32 support; with others, its process
crashes."""


def refuse_heads_without_kernel(layout: EngineLayout) -> None:
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
        arguments |= {"limit_mm_per_prompt": {layout.features: 1}, "mm_processor_cache_gb": 0}
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
