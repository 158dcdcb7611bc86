"""Language policies: causal models in Hugging Face's layout, with their chat format.

policy         `CausalLanguageModel`: what engines and learners use; `load` and `save`
chat_format    messages to prompts, replies to messages and tool calls
key_values     the slots that replies are generated in
tiny           a small model and tokenizer made here
"""

from vla_rl.models.language.chat_format import ChatFormat, parse_reply
from vla_rl.models.language.policy import CausalLanguageModel
from vla_rl.models.language.tiny import TinyConfig, tiny

__all__ = ["CausalLanguageModel", "ChatFormat", "TinyConfig", "parse_reply", "tiny"]
