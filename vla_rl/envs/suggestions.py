"""A scripted expert as a policy: the environment suggests its action, and the policy follows.

The hidden state stays in the environment's process; only one action in each observation leaves it.
`expert_action` is the right action at that moment for any acting policy, also a learnt one (DAgger,
Ross et al. 2011, arXiv:1011.0686).
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from vla_rl.envs.picture_env import PictureEnv
from vla_rl.types import ActionChunk, Info, Observation, Sampling


class ExpertSuggestions(gymnasium.Wrapper[Observation, np.ndarray, Observation, np.ndarray]):
    """An environment whose observations have the scripted expert's action.

    It is `expert_action`: float32 [D].
    """

    def __init__(self, env: PictureEnv) -> None:
        super().__init__(env)
        assert isinstance(env.observation_space, spaces.Dict)
        self.observation_space = spaces.Dict(
            {
                **env.observation_space.spaces,
                "expert_action": env.action_space,
            }
        )
        self._expert = env.make_expert()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start an episode, and let the expert plan anew."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._expert.begin()
        return {**observation, "expert_action": self._expert.act()}, info

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Run one control step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return (
            {**observation, "expert_action": self._expert.act()},
            float(reward),
            terminated,
            truncated,
            info,
        )


class ExpertPolicy:
    """Follows the suggestions, one control step at a time.

    The environments have to provide them.
    """

    async def act(self, observation: Observation, sampling: Sampling | None = None) -> ActionChunk:
        """Return the suggested action as a chunk of one row, without tokens.

        Nothing is sampled.

        Raises: `ValueError` if the observation has no suggestion.
        """
        suggestion = observation.get("expert_action")
        if not isinstance(suggestion, np.ndarray):
            raise ValueError(
                f"the observation has {sorted(observation)}, expected expert_action; "
                "use an environment with suggestions, such as vla_rl/libero_object-expert-v0."
            )
        empty = np.empty(0)
        return ActionChunk(
            actions=suggestion[None].astype(np.float32),
            tokens=empty.astype(np.int64),
            log_probs=empty.astype(np.float32),
            weight_version=0,
        )
