"""vLLM plugin: registers this package's models in an engine process before vLLM builds one.

vLLM calls it through the entry point `vllm.general_plugins`, in the client process and in every
engine process.
"""

import multiprocessing
import os
import threading
from typing import Final

from vla_rl.engines.vllm.adapter import ModelRegistry, WeightTransferEngineFactory
from vla_rl.engines.vllm.launch import TRANSFER_BACKEND, TRANSFER_CLASS
from vla_rl.models.vllm.names import ARCHITECTURES, MODEL_TYPE

_WATCHER: Final = "vla_rl-parent"


def register() -> None:
    """Register architectures, configuration and weight transfer, once a process.

    Watch the parent of a child process.
    """
    from transformers import AutoConfig

    from vla_rl.models.vllm.config import ServedConfig

    AutoConfig.register(MODEL_TYPE, ServedConfig, exist_ok=True)
    if not ARCHITECTURES.keys() <= set(ModelRegistry.get_supported_archs()):
        for name, place in ARCHITECTURES.items():
            ModelRegistry.register_model(name, place)
        WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, *TRANSFER_CLASS)
    _leave_with_the_parent()


def _leave_with_the_parent() -> None:
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
