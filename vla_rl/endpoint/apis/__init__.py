"""The APIs of the endpoint, each in a module of its own.

chat          `/v1/chat/completions`         responses     `/v1/responses`
completions   `/v1/completions`              messages      `/v1/messages`, Anthropic's
"""

from typing import Final

from vla_rl.endpoint.apis.api import Answer, Api, ApiRequest, Asked, Memory
from vla_rl.endpoint.apis.chat import ChatApi
from vla_rl.endpoint.apis.completions import CompletionApi
from vla_rl.endpoint.apis.messages import MessagesApi
from vla_rl.endpoint.apis.responses import ResponseApi

APIS: Final[tuple[Api, ...]] = (ChatApi(), ResponseApi(), CompletionApi(), MessagesApi())

__all__ = ["APIS", "Answer", "Api", "ApiRequest", "Asked", "Memory"]
