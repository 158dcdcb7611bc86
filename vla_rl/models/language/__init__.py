"""Language policies: causal models in Hugging Face's layout, with their chat format.

policy          `CausalLanguageModel`: what engines and learners use; `load` and `save`
vision_policy   `VisionLanguageModel`: the same with images; `load_language_model`
images          images as pixels, tokens and positions; `grid_images` for Qwen's models, `tile_images` for SmolVLM
image_chat      messages with images to prompts
chat_format     messages to prompts, replies to messages and tool calls
rows            rows of tokens through a network: prompts, slots of generation, scores of a learner
grammars        what a reply may be, in sampling and training
demonstrations  conversations to imitate
gguf            llama.cpp's files as folders; the model that `vla-rl install smollm2` installs
tiny            a small model and tokenizer made here

The configuration imports fast; torch and transformers are imported when a policy is first used.
"""

from typing import TYPE_CHECKING

from vla_rl.models.language.chat_format import ChatFormat as ChatFormat, parse_reply as parse_reply
from vla_rl.models.language.gguf import SMOLLM2 as SMOLLM2
from vla_rl.models.language.tiny import TinyConfig as TinyConfig, tiny as tiny
from vla_rl.util.imports import lazy_names

if TYPE_CHECKING:
    from vla_rl.models.language.policy import CausalLanguageModel as CausalLanguageModel
    from vla_rl.models.language.vision_policy import (
        VisionLanguageModel as VisionLanguageModel,
        load_language_model as load_language_model,
    )


__getattr__, __dir__ = lazy_names(__name__)
