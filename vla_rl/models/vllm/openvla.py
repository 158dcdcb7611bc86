"""OpenVLA inside an engine process: token after token, as vLLM generates."""

from typing import Any

from vla_rl.models.openvla.config import OpenVlaConfig
from vla_rl.models.vllm.prismatic import ServedPrismatic, policy_config, register_processor


@register_processor
class ServedOpenVla(ServedPrismatic):
    """A causal trunk behind two towers; vLLM samples each token."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config, policy_config(vllm_config, OpenVlaConfig), None, prefix)
