"""Rewards of episodes: a function of one trajectory, and a manager that applies it to a group.

    reward    (trajectory) -> number, or float [decisions]; plain or async
    manager   async (group, reward) -> one reward for each member, in order

Both are selected by name, or as `"module:function"` for your own. Rewards are computed group by
group, while others still run. If several agents share an episode, a reward by decision belongs to
the agent that decided, a single number to each.

The node writes `DecisionRewards`, float32 [decisions], for each episode of a group. A node that
replaces it may write single numbers too: `rewards_by_group` is the one place that reads them.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

from vla_rl.errors import ConfigError, EnvError
from vla_rl.graph import NodeOutput, WrongInput
from vla_rl.types import (
    DEFAULT_AGENT,
    Config,
    DecisionRewards,
    Group,
    Trajectory,
    list_agents,
    split_by_agent,
)
from vla_rl.util.imports import choose, is_function_path, load_function
from vla_rl.util.values import shorten_middle

T = TypeVar("T")

Reward: TypeAlias = float | np.ndarray
"""Return value of a reward function: one number, for the last decision (of each agent), or float
[decisions]."""

WrittenRewards: TypeAlias = Sequence[Sequence[Reward]] | Sequence[float] | np.ndarray
"""Value of the reward node, or of one in its place: by group, or flat over all episodes."""

RewardFunction: TypeAlias = Callable[[Trajectory], Reward | Awaitable[Reward]]
RewardManager: TypeAlias = Callable[[Group, RewardFunction], Awaitable[Sequence[Reward]]]

MAX_THREADS: Final = 16
"""Maximum number of rewards of one group that the manager `threads` computes at the same time."""


class RewardConfig(Config, frozen=True, kw_only=True):
    """The reward, and how it is applied to a group."""

    function: str = "environment"
    """`environment`: the environment's reward for each decision; `success`: 1 if the task was
    solved, else 0; or your own "module:function", which takes a trajectory and returns a number."""

    manager: str = "each"
    """`each`: reward the episodes of a group one after the other, in the event loop; `threads`: at
    the same time in threads, for functions that block; or your own "module:function", which takes a
    group and the reward."""


def environment(trajectory: Trajectory) -> np.ndarray:
    """Return the sum of rewards over the control steps of each decision: float32 [decisions]."""
    return np.array([step.rewards.sum() for step in trajectory.steps], np.float32)


def success(trajectory: Trajectory) -> float:
    """Return 1 if the task was solved, else 0."""
    return float(trajectory.is_success)


async def each(group: Group, reward: RewardFunction) -> list[Reward]:
    """Reward the episodes one after the other.

    An async reward may wait without blocking the event loop.
    """
    rewards: list[Reward] = []
    for trajectory in group.trajectories:
        value = reward(trajectory)
        rewards.append(await value if inspect.isawaitable(value) else value)
    return rewards


async def threads(group: Group, reward: RewardFunction) -> list[Reward]:
    """Reward all episodes at the same time, in threads.

    Raise the first error after all have ended.
    """
    if inspect.iscoroutinefunction(reward):
        raise ConfigError(
            "the reward manager 'threads' is for plain functions, and this reward "
            "is async; use 'each'."
        )
    # a bound of its own: the pool of asyncio's threads serves files and engines too
    room = asyncio.Semaphore(MAX_THREADS)

    async def one(trajectory: Trajectory) -> Reward:
        async with room:
            value = await asyncio.to_thread(reward, trajectory)
        assert not inspect.isawaitable(value)
        return value

    async with asyncio.TaskGroup() as tasks:
        made = [
            tasks.create_task(one(trajectory), name="reward") for trajectory in group.trajectories
        ]
    return [task.result() for task in made]


REWARDS: Final = MappingProxyType[str, RewardFunction](
    {"environment": environment, "success": success}
)
MANAGERS: Final = MappingProxyType[str, RewardManager]({"each": each, "threads": threads})


class GroupReward:
    """The node function that rewards one group.

    Raises: ConfigError, when it is made, for an unknown name.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._reward = named(REWARDS, config.function, "reward")
        self._manager = named(MANAGERS, config.manager, "reward manager")
        # images of other hosts are fetched for functions of the user alone; the built-in ones read
        # numbers
        self.may_read_images = not (
            self._reward in REWARDS.values() and self._manager in MANAGERS.values()
        )
        """Whether the reward or its manager is a function of the user's."""

    async def __call__(self, group: Group) -> NodeOutput:
        """Return `DecisionRewards` for each episode.

        Raises: ValueError, naming the episode, if a reward is not finite; EnvError if the reward is
        `success` and the environment does not report success.
        """
        if self._reward is success:
            require_known_success(group, "reward.function is 'success'")
        returned = list(await self._manager(group, self._reward))
        # a manager of the user that forgets an episode would shift the rewards of all later ones
        if len(returned) != len(group.trajectories):
            raise ValueError(
                f"the reward manager returned {len(returned)} rewards for "
                f"{len(group.trajectories)} episodes."
            )
        pairs = zip(group.trajectories, returned, strict=True)
        rewards = [decision_rewards(*pair) for pair in pairs]
        outcomes = [outcome(*pair) for pair in zip(group.trajectories, rewards, strict=True)]
        metrics = {
            "reward/mean": float(np.mean(outcomes)),
            "reward/std_in_group": float(np.std(outcomes)),
        }
        if any(trajectory.is_success_known for trajectory in group.trajectories):
            metrics["reward/success_rate"] = group.success_rate
        metrics |= _metrics_by_agent(group, rewards) | score_metrics(group.trajectories)
        return NodeOutput(rewards, metrics=metrics)


def named(table: Mapping[str, T], name: str, kind: str) -> T:
    """Return `table[name]`, or the function that `"module:function"` names.

    Raises: ConfigError with the nearest match.
    """
    if not is_function_path(name):
        return choose(table, name, kind)
    found: T = load_function(name, kind)
    return found


def outcome(trajectory: Trajectory, rewards: DecisionRewards) -> float:
    """Return the total reward of an episode; with several agents, their mean."""
    return float(np.mean(list(outcomes_by_agent(trajectory, rewards).values())))


def outcomes_by_agent(trajectory: Trajectory, rewards: DecisionRewards) -> dict[str, float]:
    """Return the total reward of each agent's decisions, by its name."""
    # agents take turns in one episode, so each one's decisions lie between the others'
    deciders = np.array([step.agent for step in trajectory.steps])
    agents = list_agents([trajectory])
    return {agent: float(np.sum(rewards[deciders == agent])) for agent in agents}


def decision_rewards(trajectory: Trajectory, reward: Reward) -> DecisionRewards:
    """Return the reward of each decision, float32 [decisions].

    A single number goes to the last decision of each agent. Raises: ValueError, naming the episode,
    unless the reward is one finite number or one for each decision.
    """
    num = len(trajectory.steps)
    try:
        values = np.asarray(reward, np.float32)
    except (TypeError, ValueError, RuntimeError):  # a text, a dict, a tensor with gradients
        values = np.full((), np.nan)
    if values.shape not in ((), (num,)) or not np.isfinite(values).all():
        raise ValueError(
            f"the reward of episode {trajectory.episode.episode_id} ({trajectory.episode.task}) "
            f"is {shorten_middle(reward)}, expected a finite number, or {num} of them, one for each decision."
        )
    if values.ndim == 1:
        return values
    # the last decision, because one number is about all that came before it
    last = {step.agent: number for number, step in enumerate(trajectory.steps)}
    spread = np.zeros(num, np.float32)
    spread[list(last.values())] = values
    return spread


def require_known_success(group: Group, wanted_by: str) -> None:
    """Raise EnvError if the environment ended episodes of the group without reporting success.

    Success is `is_success` in the info of the last step.

    Args:
        group: the episodes.
        wanted_by: description of the setting that needs the success of episodes, for the error.
    """
    members = group.trajectories
    if any(member.stop_reason.is_of_environment for member in members) and not any(
        member.is_success_known for member in members
    ):
        raise EnvError(
            f"{wanted_by}, but no episode of {group.task} (environment "
            f"{members[0].episode.env.id}) in group {group.group_id} has 'is_success' in its info; "
            "set info['is_success'] in every last step of the environment (train_toy: "
            "--success-return), or reward and filter by the return"
        )


def rewards_by_group(
    groups: Sequence[Group], rewards: WrittenRewards
) -> list[list[DecisionRewards]]:
    """Return the rewards of each group's episodes, as the reward node writes them.

    A node that replaces the reward node may write one number for an episode; it may also write one
    array or list [N] over all episodes of the update, which is split by group.

    Raises: WrongInput if their number is wrong, or if one does not fit its episode or is not
    finite.
    """
    # a replaced node of the user may write any of the three forms that other frameworks use
    found = _as_groups([len(group.trajectories) for group in groups], rewards)
    try:
        return [
            [decision_rewards(*pair) for pair in zip(group.trajectories, of_group, strict=True)]
            for group, of_group in zip(groups, found, strict=True)
        ]
    except ValueError as error:
        raise WrongInput("rewards", str(error)) from None


def _as_groups(sizes: list[int], rewards: Any) -> list[list[Reward]]:
    # torch's tensors are arrays too: rewards often come from a model
    is_array = hasattr(rewards, "__array__")
    if not is_array and (isinstance(rewards, str) or not isinstance(rewards, Sequence)):
        raise WrongInput(
            "rewards", f"it is a {type(rewards).__name__}, expected an array or a list of rewards"
        )
    if is_array or all(
        isinstance(reward, (float, int)) or getattr(reward, "ndim", None) == 0 for reward in rewards
    ):
        try:
            flat = np.asarray(rewards)
        except (TypeError, ValueError, RuntimeError) as error:  # on a GPU, or with gradients
            raise WrongInput("rewards", f"it cannot be read as an array: {error}") from None
        if flat.shape != (sum(sizes),):
            raise WrongInput(
                "rewards",
                f"its shape is {list(flat.shape)}, expected [{sum(sizes)}], one reward "
                "for each episode",
            )
        return [list(of_group) for of_group in np.split(flat, np.cumsum(sizes)[:-1])]
    try:
        found = [list(of_group) for of_group in rewards]
    except TypeError as error:
        raise WrongInput("rewards", f"a reward is no number: {error}") from None
    if [len(of_group) for of_group in found] != sizes:
        lengths = [len(of_group) for of_group in found]
        raise WrongInput(
            "rewards", f"its groups have {lengths} rewards, expected {sizes}, one for each episode"
        )
    return found


def score_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean of each entry of `info["score"]`, such as `score/ego_progress`.

    An environment whose reward has parts names them there; others have no such metrics.
    """
    # only episodes that ended on their own have a score; one that was cut off has none
    scores = [trajectory.info.get("score") for trajectory in trajectories]
    found = [score for score in scores if isinstance(score, Mapping)]
    names = sorted({name for score in found for name in score})
    return {
        f"score/{name}": float(np.mean([score[name] for score in found if name in score]))
        for name in names
    }


def _metrics_by_agent(group: Group, rewards: Sequence[DecisionRewards]) -> dict[str, float]:
    """Return each named agent's mean reward (`reward/solver/mean`) and success rate."""
    metrics = {}
    for agent in list_agents(group.trajectories):
        if agent == DEFAULT_AGENT:
            continue
        parts = split_by_agent(group.trajectories, agent)
        earned = [
            outcomes_by_agent(group.trajectories[part.row], rewards[part.row])[agent]
            for part in parts
        ]
        metrics[f"reward/{agent}/mean"] = float(np.mean(earned))
        if any(part.trajectory.is_success_known for part in parts):
            metrics[f"reward/{agent}/success_rate"] = float(
                np.mean([part.trajectory.is_success for part in parts])
            )
    return metrics
