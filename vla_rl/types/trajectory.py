"""The record of an episode from reset to end, chunk by chunk, and groups of them."""

import enum

import msgspec
import numpy as np

from vla_rl.types.episode import EpisodeSpec
from vla_rl.types.language import DEFAULT_AGENT
from vla_rl.types.observation import Info, Observation
from vla_rl.types.struct import ExplainsFields


class StopReason(enum.Enum):
    """Why an episode ended. One that was cut off would have gone on: only there a value bootstraps."""

    SUCCESS = "success"
    """The task ended it, solved."""

    TERMINATED = "terminated"
    """The task ended it otherwise."""

    SUCCESS_AT_LIMIT = "success_at_limit"
    """The environment's own limit ended it, and the task calls what was reached by then a success."""

    TIME_LIMIT = "time_limit"
    """The environment's own limit, of control steps or of turns, ended it without success."""

    TURN_LIMIT = "turn_limit"
    """The agent's limit of turns."""

    TOKEN_LIMIT = "token_limit"
    """The agent's limit of tokens, or the policy's context."""

    DEADLINE = "deadline"
    """A stage of the episode took too long."""

    ABORTED = "aborted"
    """The engine gave a reply up before its end."""

    @property
    def is_success(self) -> bool:
        """Whether the task was solved, whoever ended the episode."""
        return self in (StopReason.SUCCESS, StopReason.SUCCESS_AT_LIMIT)

    @property
    def is_of_environment(self) -> bool:
        """Whether the environment ended the episode; a limit of the agent ended the others."""
        return self in (
            StopReason.SUCCESS, StopReason.TERMINATED, StopReason.SUCCESS_AT_LIMIT, StopReason.TIME_LIMIT
        )  # fmt: skip

    @property
    def is_cut_off(self) -> bool:
        """Whether we ended the episode, and not the task."""
        return self not in (StopReason.SUCCESS, StopReason.TERMINATED)


class ActionChunk(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """H future control steps of D dimensions from one policy call, and how they were chosen."""

    actions: np.ndarray
    """float32 [H, D], in the units of the environment's action space."""

    tokens: np.ndarray
    """int64 [T] ids, or float32 [T] numbers: what was sampled; T = H * D for one token a number, in time-major order."""

    log_probs: np.ndarray
    """float32 [T], natural log of each token's probability under the weights that acted, after temperature."""

    weight_version: int
    """Number of updates applied to the weights that acted; stamped by the engine. Of the oldest token, where they differ."""

    weight_versions: np.ndarray | None = None
    """int64 [T], of each token, from an engine whose weights may change between two tokens of one answer."""

    temperature: float | None = None
    """Of `log_probs`, noted by the policy that an agent is handed; None: that of the episode's own sampling."""


class ChunkOutcome(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """What one action chunk did to the environment."""

    observation: Observation
    """After the last executed row."""

    rewards: np.ndarray
    """float32 [N], one for each executed control step, 1 <= N <= H; N < H only where the episode ended."""

    terminated: bool
    truncated: bool
    info: Info

    frames: np.ndarray | None = None
    """uint8 [n, S, S, 3], what the environment renders (LIBERO: its fixed camera) after every k-th control step of the
    episode, for those that fell into this chunk; None where none did or none was asked for."""

    frames_key: str | None = None
    """Observation key whose picture that is, such as `image`; None where the environment does not say."""


class Step(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """One decision: what the policy saw, what it answered, and the rewards of the rows that ran."""

    observation: Observation
    chunk: ActionChunk
    rewards: np.ndarray
    """float32 [N], 1 <= N <= H."""

    frames: np.ndarray | None = None
    """`ChunkOutcome.frames` of this chunk."""

    frames_key: str | None = None
    """`ChunkOutcome.frames_key`: which picture of the observation the frames show."""

    agent: str = DEFAULT_AGENT
    """Who decided, where several agents share an episode."""

    @property
    def num_executed(self) -> int:
        """Control steps of this chunk that ran."""
        return len(self.rewards)


class Trajectory(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """One episode. Its mask ends at the exact control step that ended it."""

    episode: EpisodeSpec
    steps: tuple[Step, ...]
    final_observation: Observation
    stop_reason: StopReason
    info: Info = {}
    """The info of the last step, plus what the agent adds."""

    @property
    def is_success(self) -> bool:
        """True where the task was solved."""
        return self.stop_reason.is_success

    @property
    def is_success_known(self) -> bool:
        """Whether the episode ended with a verdict: its info has the key `is_success`, or the agent says so itself."""
        return self.is_success or "is_success" in self.info

    @property
    def num_env_steps(self) -> int:
        """Control steps that ran."""
        return sum(step.num_executed for step in self.steps)

    @property
    def undiscounted_return(self) -> float:
        """Sum of the environment's rewards, to all agents."""
        return float(sum(float(step.rewards.sum()) for step in self.steps))

    @property
    def returns_by_agent(self) -> dict[str, float]:
        """The same for each agent that decided something, by name, in order of their first decisions."""
        earned: dict[str, float] = {}
        for step in self.steps:
            earned[step.agent] = earned.get(step.agent, 0.0) + float(step.rewards.sum())
        return earned

    @property
    def oldest_version(self) -> int:
        """Weight version of the oldest chunk; staleness is counted from it."""
        return min(step.chunk.weight_version for step in self.steps)

    @property
    def newest_version(self) -> int:
        """Weight version of the newest token."""
        return max(
            step.chunk.weight_version if step.chunk.weight_versions is None else int(step.chunk.weight_versions.max())
            for step in self.steps
        )


class Group(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """Trajectories of one task and one start, in order of `episode.member`."""

    group_id: int
    trajectories: tuple[Trajectory, ...]
    dispatch_version: int
    """Weight version when the group was admitted; its staleness is counted from here, queues included."""

    @property
    def task(self) -> str:
        """The one task of all members."""
        return self.trajectories[0].episode.task

    @property
    def success_rate(self) -> float:
        """Share of the members that solved the task."""
        return sum(trajectory.is_success for trajectory in self.trajectories) / len(self.trajectories)
