"""`VllmChatEngine`: replies from processes of vLLM."""

from collections.abc import Sequence

from vla_rl.engines.chat_interface import Question, Sampled
from vla_rl.engines.config import EngineConfig
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.replying import ReplyingEngine
from vla_rl.engines.vllm.adapter import require_grammars
from vla_rl.engines.vllm.engine import VllmEngine
from vla_rl.engines.vllm.requests import ReplyRules
from vla_rl.engines.vllm.served import EngineRequest, ServedLanguage
from vla_rl.types import Sampling


class VllmChatEngine(VllmEngine, ReplyingEngine):
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
        ReplyingEngine.__init__(self, served.chat, lane, config, served.layout.context_size)

    async def _sample(self, asked: Question, sampling: Sampling, max_tokens: int) -> Sampled:
        if asked.grammar is not None:
            require_grammars()
        rules = ReplyRules(
            stop_tokens=tuple(sorted(self._chat.stop_tokens)),
            stop=asked.options.stop,
            grammar=asked.grammar,
            num_alternatives=asked.options.top_log_probs or 0,
        )
        answer = await self._router.answer(
            EngineRequest(asked.tokens.tolist()), sampling, max_tokens, rules
        )
        return Sampled(
            tokens=answer.tokens,
            log_probs=answer.log_probs,
            versions=answer.versions,
            finish_reason="stop" if answer.finish_reason == "stop" else "length",
            stopped_by=answer.stopped_by,
            alternatives=[row[: rules.num_alternatives] for row in answer.alternatives],
        )
