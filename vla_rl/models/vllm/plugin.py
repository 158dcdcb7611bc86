"""vLLM plugin: registers this package's models in an engine process before vLLM builds one.

vLLM calls `register` through the entry point `vllm.general_plugins`, in the client process and in
every engine process. The client names a model by `MODEL_TYPE` and `ARCHITECTURES`; vLLM reads its
configuration from `config.json` as a `ServedConfig`.
"""

import multiprocessing
import os
import threading
from typing import Any, Final

from transformers import AutoConfig, LlamaConfig, PretrainedConfig

from vla_rl.models.prismatic.config import LlmConfig

_WATCHER: Final = "vla_rl-parent"

MODEL_TYPE: Final = "vla_rl"
"""`model_type` of the configurations that `ServedConfig` reads."""

OPENVLA: Final = "VlaRlOpenVla"
OPENVLA_OFT: Final = "VlaRlOpenVlaOft"

ARCHITECTURES: Final = {
    OPENVLA: "vla_rl.models.vllm.networks:ServedOpenVla",
    OPENVLA_OFT: "vla_rl.models.vllm.networks:ServedOpenVlaOft",
}
"""`architectures` in a configuration, and the path of each class."""


class ServedConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """A policy's own configuration, and the trunk's as vLLM expects it.

    Args:
        policy: the policy's configuration, as plain values.
        text_config: the Llama's configuration.
        num_features: number of tokens for images and proprioception.
    """

    model_type = MODEL_TYPE
    sub_configs = {"text_config": LlamaConfig}  # noqa: RUF012  # transformers' own way

    def __init__(
        self,
        policy: dict[str, Any] | None = None,
        text_config: dict[str, Any] | LlamaConfig | None = None,
        num_features: int = 0,
        **kwargs: Any,
    ) -> None:
        self.policy = policy or {}
        self.text_config = (
            text_config
            if isinstance(text_config, LlamaConfig)
            else LlamaConfig(**(text_config or {}))
        )
        self.num_features = num_features
        super().__init__(**kwargs)

    def get_text_config(self, decoder: bool = False, encoder: bool = False) -> LlamaConfig:
        """Return the trunk's configuration."""
        return self.text_config


def trunk_config(llm: LlmConfig, context_size: int, *, is_causal: bool) -> dict[str, Any]:
    """Return the configuration of the trunk that `build_trunk` builds, in plain values."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": llm.table_size,
        "hidden_size": llm.hidden_size,
        "intermediate_size": llm.intermediate_size,
        "num_hidden_layers": llm.num_layers,
        "num_attention_heads": llm.num_heads,
        "num_key_value_heads": llm.num_heads,
        "rms_norm_eps": llm.rms_norm_eps,
        "pad_token_id": llm.pad_token_id,
        "max_position_embeddings": context_size,
        "tie_word_embeddings": False,
        "is_causal": is_causal,
    }


def register() -> None:
    """Register architectures, configuration and weight transfer, once a process.

    Watch the parent of a child process.
    """
    # the configuration is read where vLLM is not installed
    from vla_rl.engines.vllm.adapter import ModelRegistry, WeightTransferEngineFactory
    from vla_rl.engines.vllm.launch import TRANSFER_BACKEND, TRANSFER_CLASS

    AutoConfig.register(MODEL_TYPE, ServedConfig, exist_ok=True)
    if not ARCHITECTURES.keys() <= set(ModelRegistry.get_supported_archs()):
        for name, path in ARCHITECTURES.items():
            ModelRegistry.register_model(name, path)
        WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, *TRANSFER_CLASS)
    _exit_with_the_parent()


def _exit_with_the_parent() -> None:
    """End this process with its parent, also if Python skipped the `preload` folder (its flags -E
    and -I).
    """
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == _WATCHER for thread in threading.enumerate()):
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name=_WATCHER, daemon=True).start()
