"""The configuration of a served OpenVLA, as vLLM reads it from `config.json`."""

from typing import Any

from transformers import LlamaConfig, PretrainedConfig

from vla_rl.models.prismatic.config import LlmConfig
from vla_rl.models.vllm.names import MODEL_TYPE


class ServedConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """A policy's own configuration, and the trunk's as vLLM expects it.

    Args:
        policy: the policy's configuration, as plain values.
        text_config: the Llama's configuration.
        num_features: number of tokens for pictures and proprioception.
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
