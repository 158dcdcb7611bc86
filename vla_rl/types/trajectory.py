"""The record of an episode from reset to end, chunk by chunk.

A group holds the trajectories of one start.
"""

import enum
from typing import Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from vla_rl.types.config import ExplainsFields
from vla_rl.types.episode import EpisodeSpec
from vla_rl.types.language import DEFAULT_AGENT
from vla_rl.types.observation import ImageCacheRef, Info, Observation

MAX_LOG_PROB: Final = 1e-3
"""Largest log-prob of a token, in nats. Rounding in a log-softmax may lift a certain token a little
above 0; larger numbers are not natural logs of probabilities."""


def find_impossible_log_prob(
    log_probs: NDArray[np.floating], tokens: NDArray[np.generic]
) -> int | None:
    """Find the first log-prob that no policy can have.

    Args:
        log_probs: float [T].
        tokens: [T]; integers are ids with a probability, floats are numbers with a density, whose
            log may be above 0.

    Returns: its index, or None.
    """
    # NaN compares false with everything
    possible = (log_probs > -np.inf) & (
        log_probs < np.inf if tokens.dtype.kind == "f" else log_probs <= MAX_LOG_PROB
    )
    return None if possible.all() else int(np.argmin(possible))


class StopReason(enum.Enum):
    """Why an episode ended.

    An episode that was cut off would have continued: only then a value bootstraps.
    """

    SUCCESS = "success"
    """The task ended the episode, and was solved."""

    TERMINATED = "terminated"
    """The task ended the episode without being solved."""

    # Apart from SUCCESS: the episode would have gone on, so a value bootstraps behind its end.
    SUCCESS_AT_LIMIT = "success_at_limit"
    """The environment's own limit ended the episode, and the task was solved by then."""

    TIME_LIMIT = "time_limit"
    """The environment's own limit, of control steps or of turns, ended the episode without
    success."""

    TURN_LIMIT = "turn_limit"
    """The agent's limit of turns ended the episode."""

    TOKEN_LIMIT = "token_limit"
    """The agent's limit of tokens, or the policy's context, ended the episode."""

    DEADLINE = "deadline"
    """A stage of the episode took too long."""

    ABORTED = "aborted"
    """The engine aborted a reply."""

    REPLY_REJECTED = "reply_rejected"
    """The policy's chat template rejects the conversation because of the policy's own replies, such
    as two tool calls where it takes one. The policy ended the episode, so nothing bootstraps."""

    @property
    def is_success(self) -> bool:
        """Whether the task was solved, by any ending."""
        return self in (StopReason.SUCCESS, StopReason.SUCCESS_AT_LIMIT)

    @property
    def is_of_environment(self) -> bool:
        """Whether the environment ended the episode; if not, the agent did."""
        return self in (
            StopReason.SUCCESS, StopReason.TERMINATED, StopReason.SUCCESS_AT_LIMIT, StopReason.TIME_LIMIT
        )  # fmt: skip

    @property
    def is_cut_off(self) -> bool:
        """Whether a limit ended the episode, and not the task."""
        return self not in (
            StopReason.SUCCESS, StopReason.TERMINATED, StopReason.REPLY_REJECTED
        )  # fmt: skip


class ActionChunk(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """H control steps of D dimensions from one policy call, and how they were sampled.

    Example:
        Two control steps of three dimensions, with one token a number:

        ActionChunk(actions=...,  # float32 [2, 3]
                    tokens=np.array([31, 7, 255, 30, 9, 255]), log_probs=..., weight_version=12)
    """

    actions: np.ndarray
    """float32 [H, D], in the units of the environment's action space."""

    tokens: np.ndarray
    """int64 [T] ids or float32 [T] numbers that were sampled; T = H * D for one token a number, in
    time-major order."""

    log_probs: np.ndarray
    """float32 [T], natural log of each token's probability under the weights that acted, after
    temperature."""

    weight_version: int
    """Number of updates applied to the weights that acted, set by the engine; that of the oldest
    token if they differ."""

    weight_versions: np.ndarray | None = None
    """int64 [T], weight version of each token, from an engine whose weights may change within an
    answer."""

    temperature: float | None = None
    """Temperature of `log_probs`, recorded by the policy that an agent gets; None: that of the
    episode's own sampling."""

    drawn: dict[str, np.ndarray] | None = None
    """Arrays by name that `log_probs` depend on too, such as the state before a flow's stochastic step;
    a learner hands them to the policy with the observation. None: observation and tokens suffice."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one control step; all of a reply's, which is one step of any length.

        Raises: ValueError if the tokens cannot be shared out evenly.
        """
        num_tokens, horizon = len(self.tokens), len(self.actions)
        if num_tokens % horizon:
            raise ValueError(
                f"a chunk has {num_tokens} tokens for {horizon} control steps, expected "
                "a multiple of them."
            )
        return num_tokens // horizon


class ChunkOutcome(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """The result of one action chunk in the environment."""

    observation: Observation
    """Observation after the last executed row."""

    rewards: np.ndarray
    """float32 [N], one for each executed control step, 1 <= N <= H; N < H only if the episode
    ended."""

    terminated: bool
    truncated: bool
    info: Info

    frames: np.ndarray | None = None
    """uint8 [n, S, S, 3], the environment's rendering (LIBERO: its fixed camera) after every k-th
    control step of the episode, for those steps that are in this chunk; None if there are none or
    none were requested."""

    frames_key: str | None = None
    """Observation key of that image, such as `image`; None if the environment does not name it."""


class Step(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True, omit_defaults=True):
    """One decision: the policy's observation, its answer, and the rewards of the rows that ran."""

    observation: Observation
    chunk: ActionChunk
    rewards: np.ndarray
    """float32 [N], 1 <= N <= H."""

    frames: np.ndarray | None = None
    """`ChunkOutcome.frames` of this chunk."""

    frames_key: str | None = None
    """`ChunkOutcome.frames_key`: the observation key whose image the frames show."""

    agent: str = DEFAULT_AGENT
    """The agent that decided, if several share an episode."""

    intervened: np.ndarray | None = None
    """bool [N], True for the control steps that an expert or a person chose instead of the policy. Those
    rows of `chunk.actions` are the expert's; tokens, log-probs and `drawn` stay the policy's own. None:
    the policy chose all."""

    expert_actions: np.ndarray | None = None
    """float32 [H, D], what an expert does from this observation on, in the units of `chunk.actions`: the
    label of this decision. None: it has no label."""

    @property
    def is_reply(self) -> bool:
        """Whether it is a reply in a conversation and no control steps."""
        return "prompt_tokens" in self.observation

    @property
    def num_executed(self) -> int:
        """Control steps of this chunk that ran."""
        return len(self.rewards)

    @property
    def executed_tokens(self) -> np.ndarray:
        """bool [T], True for the tokens of the control steps that ran and that the policy chose."""
        # tokens are in time-major order, so the steps that ran are the first ones
        each = self.chunk.tokens_per_step
        ran = np.arange(len(self.chunk.tokens)) < self.num_executed * each
        if self.intervened is not None:
            # what an expert did says nothing about tokens that were never executed
            ran[: self.num_executed * each] &= ~np.repeat(self.intervened, each)
        return ran


class EpisodeRef(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """The location of a trajectory's large arrays on the host where they were made.

    Example:
        EpisodeRef(host="gpu2", key=107, num_bytes=9_031_680)
    """

    host: str
    key: int
    num_bytes: int


class Trajectory(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """One episode. Its mask ends at the exact control step that ended it."""

    episode: EpisodeSpec
    steps: tuple[Step, ...]
    final_observation: Observation
    stop_reason: StopReason
    info: Info = {}
    """The info of the last step, plus what the agent adds."""

    # The names in files of earlier versions, whose outstanding episodes a resume has to find.
    episode_ref: EpisodeRef | None = msgspec.field(default=None, name="deposit")
    """Place of its observations, tokens and actions, if it is metadata-only: then rewards, versions, infos
    and small values alone are here. None for every trajectory of an update."""

    cached_images: ImageCacheRef | None = msgspec.field(default=None, name="shelved")
    """Place of its large observations, if they are beside the ranks that will read them: then each is
    an `ArrayRef` here. None: all is here, or with the deposit."""

    embedding: np.ndarray | None = None
    """float32 [T, D], the trajectory as the run's encoder sees it, computed on the host that ran the
    episode. None: computed when it is needed."""

    @property
    def is_success(self) -> bool:
        """Whether the task was solved."""
        return self.stop_reason.is_success

    @property
    def is_success_known(self) -> bool:
        """Whether the info has the key `is_success`, or the stop reason is a success."""
        # Without this, tasks that cannot report success would count as failures in every rate.
        return self.is_success or "is_success" in self.info

    @property
    def num_env_steps(self) -> int:
        """Control steps that ran."""
        return sum(step.num_executed for step in self.steps)

    @property
    def num_executed_tokens(self) -> int:
        """Tokens of the control steps that ran and that the policy chose."""
        return sum(int(step.executed_tokens.sum()) for step in self.steps)

    @property
    def undiscounted_return(self) -> float:
        """Sum of the environment's rewards for all agents."""
        return float(sum(float(step.rewards.sum()) for step in self.steps))

    @property
    def returns_by_agent(self) -> dict[str, float]:
        """Return the same for each agent with a decision, by name, in order of first decisions."""
        earned: dict[str, float] = {}
        for step in self.steps:
            earned[step.agent] = earned.get(step.agent, 0.0) + float(step.rewards.sum())
        return earned

    @property
    def oldest_version(self) -> int:
        """Weight version of the oldest chunk; staleness is counted from it."""
        # The oldest: one stale chunk makes the whole episode off-policy by as much.
        return min(step.chunk.weight_version for step in self.steps)

    @property
    def newest_version(self) -> int:
        """Weight version of the newest token."""
        return max(
            step.chunk.weight_version
            if step.chunk.weight_versions is None
            else int(step.chunk.weight_versions.max())
            for step in self.steps
        )


class Group(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """Trajectories of one task and one start, in order of `episode.member`."""

    group_id: int
    trajectories: tuple[Trajectory, ...]
    dispatch_version: int
    """Weight version when the group was admitted; its staleness is counted from here, queues
    included."""

    @property
    def task(self) -> str:
        """The task of all members."""
        return self.trajectories[0].episode.task

    @property
    def success_rate(self) -> float:
        """Share of the members that solved the task."""
        return sum(trajectory.is_success for trajectory in self.trajectories) / len(
            self.trajectories
        )


DecisionRewards: TypeAlias = NDArray[np.float32]
"""Rewards of one episode, float32 [decisions]: what each decision earned."""
