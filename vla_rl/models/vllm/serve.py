"""Policies as vLLM serves them: a policy's class names the function that makes its form.

    OpenVla.vllm_form ─► "module:function" ─► function(policy, max_context, max_images) ─► ServedPolicy

OpenVLA, OpenVLA-OFT with tokens (`served_prismatic`) and language models (`served_language`) have one; a family of
your own names its own.
"""

from pkgutil import resolve_name
from typing import Any, Final

from vla_rl.errors import ConfigError

MODALITY: Final = "image"
"""vLLM's name for what a request shows."""


def serve(policy: Any, *, max_context: int | None = None, max_images: int = 1) -> Any:
    """Return a policy in the form that `VllmActionEngine` or `VllmChatEngine` serves, by its `vllm_form`.

    Args:
        policy: the policy.
        max_context: shortens a language model's context.
        max_images: largest number of images that a conversation shows to a language model.

    Returns: a `ServedActions` or a `ServedLanguage` (`vla_rl.engines.vllm.served`).
    Raises: ConfigError for a policy that no engine can serve.
    """
    form: str | None = getattr(policy, "vllm_form", None)
    if form is None:
        raise ConfigError(
            f"engine 'vllm' cannot serve {type(policy).__name__}, which names no `vllm_form`; expected OpenVla, "
            "OpenVlaOft (with the head `tokens`), CausalLanguageModel, or a family that names one. Take engine 'torch'."
        )
    return resolve_name(form)(policy, max_context, max_images)
