"""Engines, which compute actions and replies, and the lane through which a process uses its device.

policy_model   methods that engines and learners need from a policy family; language_model: from one
               that generates text
device_lane    the one thread that uses the device
torch_engine   `TorchActionEngine`, `TorchChatEngine`: batches of the requests that wait
vllm           `VllmActionEngine`, `VllmChatEngine`: the same in processes of vLLM
remote         `RemoteChatEngine`: replies from vLLM and SGLang servers that run elsewhere

`ActionEngine` and `ChatEngine`, which these implement, are the protocols of `vla_rl.rollout`.

Importing the configuration does not import torch; the other names do when they are first used.
"""

from typing import TYPE_CHECKING

from vla_rl.engines.config import EngineConfig as EngineConfig
from vla_rl.util.lazy_names import lazy_names

if TYPE_CHECKING:
    from vla_rl.engines.device_lane import DeviceLane as DeviceLane
    from vla_rl.engines.language_model import LanguageModel as LanguageModel
    from vla_rl.engines.policy_model import PolicyModel as PolicyModel, TokenModel as TokenModel
    from vla_rl.engines.torch_engine import (
        TorchActionEngine as TorchActionEngine,
        TorchChatEngine as TorchChatEngine,
        TorchEngine as TorchEngine,
        make_torch_engine as make_torch_engine,
    )


__getattr__, __dir__ = lazy_names(__name__)
