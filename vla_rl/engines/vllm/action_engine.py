"""`VllmActionEngine`: action chunks from processes of vLLM."""

from collections.abc import Sequence

from vla_rl.engines.config import EngineConfig
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.vllm.engine import VllmEngine
from vla_rl.engines.vllm.requests import NO_RULES
from vla_rl.engines.vllm.served import ServedActions
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
        self.token_ids: range | None = getattr(served, "token_ids", None)
        """Ids of the tokens that the policy chooses from; None if it does not name them."""

    async def act(self, observation: Observation, sampling: Sampling | None = None) -> ActionChunk:
        """Choose an action chunk; all of its tokens come from the weights that its version names.

        Raises: ValueError if the observation does not suit the policy; ActorDied if engines died in
        all `attempts` at the request.
        """
        request = await self._lane.prepare(self._actions.request, observation)
        answer = await self._router.answer(
            request, sampling or Sampling(), self._num_tokens, NO_RULES
        )
        return ActionChunk(
            actions=self._actions.decode(answer.tokens),
            tokens=answer.tokens,
            log_probs=answer.log_probs,
            weight_version=int(answer.versions[0]),
        )
