"""Language policies: causal models in Hugging Face's layout, with their chat format.

policy         `CausalLanguageModel`: what engines and learners use; `load` and `save`
chat_format    messages to prompts, replies to messages and tool calls
key_values     the slots that replies are generated in
tiny           a small model and tokenizer made here

The configuration imports fast; torch and transformers are imported when a policy is first used.
"""

from typing import TYPE_CHECKING, Any

from vla_rl.models.language.chat_format import ChatFormat, parse_reply
from vla_rl.models.language.tiny import TinyConfig, tiny

if TYPE_CHECKING:
    from vla_rl.models.language.policy import CausalLanguageModel

__all__ = ["CausalLanguageModel", "ChatFormat", "TinyConfig", "parse_reply", "tiny"]


def __getattr__(name: str) -> Any:
    if name == "CausalLanguageModel":
        from vla_rl.models.language.policy import CausalLanguageModel

        return CausalLanguageModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
