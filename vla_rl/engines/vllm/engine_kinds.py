"""The two kinds of vLLM engine: one for action chunks, one for replies."""

from collections.abc import Sequence
from typing import Any

from vla_rl.engines.chat_interface import ChatEngineBase, Question, Sampled
from vla_rl.engines.config import EngineConfig, VllmConfig as VllmConfig
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.vllm.adapter import require_grammars
from vla_rl.engines.vllm.engine import VllmEngine
from vla_rl.engines.vllm.served import (
    NO_RULES,
    ServedActions,
    ServedLanguage,
    join_answers,
    make_reply_rules,
)
from vla_rl.types import ActionChunk, Observation, Sampling


class VllmActionEngine(VllmEngine):
    """The `ActionEngine` in processes of vLLM. Args: those of `VllmEngine`."""

    def __init__(
        self,
        served: ServedActions,
        lane: DeviceLane,
        config: EngineConfig,
        weight_version: int = 0,
        gpus: Sequence[str] = (),
    ) -> None:
        super().__init__(served, lane, config, weight_version, gpus)
        assert served.layout.num_tokens is not None
        self._actions, self._num_tokens = served, served.layout.num_tokens
        # With it, an agent that hands over a token of another policy is named with its episode,
        # before the learner fails on it.
        self.token_ids: range | None = getattr(served, "token_ids", None)
        """Ids of the tokens that the policy chooses from; None if it does not name them."""

    async def act(self, observation: Observation, sampling: Sampling | None = None) -> ActionChunk:
        """Choose an action chunk; all of its tokens come from the weights that its version names.

        Raises: ValueError if the observation does not suit the policy; ActorDied if engines died in
        all `attempts` at the request.
        """
        request = await self._lane.prepare(self._actions.request, observation)
        answer = await self._pool.answer_request(
            request, sampling or Sampling(), self._num_tokens, NO_RULES
        )
        return ActionChunk(
            actions=self._actions.decode(answer.tokens),
            tokens=answer.tokens,
            log_probs=answer.log_probs,
            weight_version=int(answer.versions[0]),
        )


class VllmChatEngine(VllmEngine, ChatEngineBase):
    """The `ChatEngine` in processes of vLLM. Args: those of `VllmEngine`."""

    def __init__(
        self,
        served: ServedLanguage,
        lane: DeviceLane,
        config: EngineConfig,
        weight_version: int = 0,
        gpus: Sequence[str] = (),
    ) -> None:
        VllmEngine.__init__(self, served, lane, config, weight_version, gpus)
        ChatEngineBase.__init__(self, served.chat, lane, config, served.layout.context_size)
        self._language = served

    async def _sample(self, asked: Question, sampling: Sampling, max_tokens: int) -> Sampled:
        if asked.grammar is not None:
            # At the first grammar and not at the start: most runs need none of vLLM's libraries for
            # them.
            require_grammars()
        rules = make_reply_rules(asked, self._chat.stop_tokens)
        request = await self._lane.prepare(self._language.request, asked)
        answer = await self._pool.answer_request(request, sampling, max_tokens, rules)
        return join_answers([answer], rules)


def make_vllm_engine(
    served: ServedActions | ServedLanguage,
    lane: DeviceLane,
    config: EngineConfig,
    weight_version: int = 0,
    gpus: Sequence[str] = (),
) -> VllmActionEngine | VllmChatEngine:
    """Make the engine that suits a policy: one that ends its own replies chats."""
    kind: Any = VllmChatEngine if served.layout.num_tokens is None else VllmActionEngine
    engine: VllmActionEngine | VllmChatEngine = kind(served, lane, config, weight_version, gpus)
    return engine
