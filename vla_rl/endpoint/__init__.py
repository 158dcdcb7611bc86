"""An OpenAI-compatible endpoint in front of any policy.

It trains agents that were not written for training.

Endpoint         serves OpenAI's chat completions, responses and completions, and Anthropic's
                 messages; `endpoint.session(policy)` makes a key for one episode
Session          records the calls under the key, and makes a `Trajectory` of them
external_agent   any coroutine or program that talks to OpenAI's API, as an agent of the scheduler
"""

from vla_rl.endpoint.external import ExternalAgent, ExternalTask, external_agent
from vla_rl.endpoint.server import Endpoint, EndpointConfig
from vla_rl.endpoint.session import RecordedCall, Session, find_threads

__all__ = [
    "Endpoint",
    "EndpointConfig",
    "ExternalAgent",
    "ExternalTask",
    "RecordedCall",
    "Session",
    "external_agent",
    "find_threads",
]
