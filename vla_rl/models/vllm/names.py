"""Names that the client process and the engine processes share."""

from typing import Final

MODEL_TYPE: Final = "vla_rl"
"""`model_type` of the configurations that `ServedConfig` reads."""

OPENVLA: Final = "VlaRlOpenVla"
OPENVLA_OFT: Final = "VlaRlOpenVlaOft"

ARCHITECTURES: Final = {
    OPENVLA: "vla_rl.models.vllm.openvla:ServedOpenVla",
    OPENVLA_OFT: "vla_rl.models.vllm.openvla_oft:ServedOpenVlaOft",
}
"""`architectures` in a configuration, and the path of each class."""
