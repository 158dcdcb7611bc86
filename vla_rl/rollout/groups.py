"""The source of groups: a data set of starts, shuffled anew each epoch, without end.

It can be resumed at any point.

A start is one task and one initial state; a group runs it `group_size` times, with different policy
seeds and all else equal. What always holds: after N epochs every start was handed out N times; a
start that was lost is handed out again before any other; two sources of the same starts and seed
give the same groups, and a restored source continues where it was.
"""

import hashlib
import random
from collections import deque
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import msgspec
import numpy as np

from vla_rl.errors import ConfigError
from vla_rl.types import EnvSpec, EpisodeSpec, ExplainsFields, Sampling, derive_seed
from vla_rl.util.values import make_fields_plain


class TaskStart(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """The start of an episode: an environment, the name of its task, and an initial state.

    Example:
        TaskStart(env=EnvSpec(id="vla_rl/libero_goal-v0"), task="libero_goal/3",
                  options={"init_state_id": 7})
    """

    env: EnvSpec

    task: str
    """Name under which results are reported, such as `libero_goal/3`."""

    seed: int = 0
    """Seed of the environment."""

    options: dict[str, Any] = {}
    """`options` of the environment's reset, such as `{"init_state_id": 7}`."""

    def __post_init__(self) -> None:
        make_fields_plain(self)


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A group to run: its episodes, and the position of its start in the data set.

    Example:
        Group 12 runs the fourth start with eight members, whose episodes are numbered from 96:

        GroupPlan(group_id=12, start_index=3, episodes=(EpisodeSpec(episode_id=96, group_id=12, ...), ...))
    """

    group_id: int
    start_index: int
    """Position of the start in the source's `starts`."""

    episodes: tuple[EpisodeSpec, ...]
    """The episodes of the group, in order of `member`."""


class ReturnedStart(msgspec.Struct, frozen=True, array_like=True):
    """A start that was lost and waits to be handed out again."""

    start_index: int


class SourceState(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a `GroupSource`, and what it hands out.

    A state of an older version has None for the latter.

    Example:
        The second pass over 500 starts, 20 of which were handed out; start 3 was lost and comes next:

        SourceState(num_starts=500, epoch=1, position=20, next_group_id=521,
                    returned=(ReturnedStart(3),), group_size=8, num_greedy=0, seed=0)
    """

    num_starts: int
    epoch: int
    position: int
    """Starts already handed out in this epoch."""

    next_group_id: int
    returned: tuple[ReturnedStart, ...] = ()
    group_size: int | None = None
    num_greedy: int | None = None
    seed: int | None = None
    starts_digest: str | None = None
    """Digest of the starts in their order, and of their kinds."""


class GroupSource:
    """Hands out groups of episodes, one shuffled pass over the starts after the other.

    Args:
        starts: the data set.
        group_size: episodes in a group.
        seed: seed of the shuffles and of the policy's decisions.
        sampling: how the policy acts in these episodes.
        num_greedy: this many members of each group, the last ones, take the most likely action
            instead, as a baseline.
        kinds: a name for each start; starts of different kinds take turns, as evenly as their
            numbers allow, so that episodes of all kinds run at any time. None: the order of the
            shuffle.
    """

    def __init__(
        self,
        starts: Sequence[TaskStart],
        group_size: int,
        seed: int,
        *,
        sampling: Sampling | None = None,
        num_greedy: int = 0,
        kinds: Sequence[str] | None = None,
    ) -> None:
        if not starts:
            raise ConfigError(
                "there are no starts, expected at least one TaskStart to start episodes from"
            )
        if group_size < 1 or not 0 <= num_greedy <= group_size:
            raise ConfigError(
                f"groups have {group_size} members, {num_greedy} of them greedy: expected at least "
                "1, and no more greedy members than a group has"
            )
        # Checked here, because a list that is too short would fail at the first start beyond it,
        # which may be hours later.
        if kinds is not None and len(kinds) != len(starts):
            raise ConfigError(f"{len(kinds)} kinds for {len(starts)} starts, expected one for each")
        self._starts, self._group_size, self._seed = tuple(starts), group_size, seed
        self._kinds = kinds
        self._starts_digest = _digest_starts(self._starts, kinds)
        self._sampling = sampling if sampling is not None else Sampling()
        self._num_sampled = group_size - num_greedy
        self._returned: deque[ReturnedStart] = deque()
        self._next_group_id = self._position = self._epoch = 0
        self._order = self._shuffled(0)

    @property
    def group_size(self) -> int:
        """Episodes in a group."""
        return self._group_size

    @property
    def epoch(self) -> int:
        """Complete passes over the starts so far."""
        return self._epoch

    def next_group(self) -> GroupPlan:
        """Return the next group: from a returned start if there is one, else from the epoch."""
        if self._returned:
            start_index = self._returned.popleft().start_index
        else:
            start_index = self._order[self._position]
            self._position += 1
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._shuffled(self._epoch)
        # Never used again, not even for a start that is handed out again: seeds, metrics and files
        # are named by it.
        group_id = self._next_group_id
        self._next_group_id += 1
        episodes = tuple(
            self._episode(start_index, group_id, member) for member in range(self._group_size)
        )
        return GroupPlan(group_id=group_id, start_index=start_index, episodes=episodes)

    def return_start(self, plan: GroupPlan) -> None:
        """Take back the start of a group that was lost untrained; it is handed out again."""
        self._returned.append(ReturnedStart(plan.start_index))

    def state(self) -> SourceState:
        """Return the state to `restore` into a source of the same starts, kinds, sizes and seed."""
        return SourceState(
            num_starts=len(self._starts),
            epoch=self._epoch,
            position=self._position,
            next_group_id=self._next_group_id,
            returned=tuple(self._returned),
            group_size=self._group_size,
            num_greedy=self._group_size - self._num_sampled,
            seed=self._seed,
            starts_digest=self._starts_digest,
        )

    def restore(self, state: SourceState) -> None:
        """Continue where `state` was taken.

        Raises: ConfigError if it is of a source that hands out other groups.
        """
        own = self.state()
        # A state of an older version has None where it recorded nothing, which fits every source.
        differ = [
            f"{name} {saved!r}, now {getattr(own, name)!r}"
            for name in ("num_starts", "group_size", "num_greedy", "seed", "starts_digest")
            if (saved := getattr(state, name)) not in (None, getattr(own, name))
        ]
        if differ:
            raise ConfigError(
                "the checkpoint hands out other groups than this run would: it was saved with "
                f"{'; '.join(differ)}. Resume with the tasks, initial states, group size and seed "
                "of the checkpoint, or start a new run"
            )
        self._epoch, self._position, self._next_group_id = (
            state.epoch,
            state.position,
            state.next_group_id,
        )
        self._returned = deque(state.returned)
        self._order = self._shuffled(state.epoch)

    def _shuffled(self, epoch: int) -> list[int]:
        # The shuffle follows from seed and epoch alone, so that a state needs only a number and no
        # list of starts.
        order = list(range(len(self._starts)))
        random.Random(derive_seed(self._seed, "epoch", epoch)).shuffle(order)
        return order if self._kinds is None else _interleave_kinds(order, self._kinds)

    def _episode(self, start_index: int, group_id: int, member: int) -> EpisodeSpec:
        start = self._starts[start_index]
        return EpisodeSpec(
            episode_id=group_id * self._group_size + member,
            group_id=group_id,
            member=member,
            env=start.env,
            task=start.task,
            seed=start.seed,
            policy_seed=derive_seed(self._seed, "policy", group_id, member),
            options=start.options,
            sampling=msgspec.structs.replace(
                self._sampling, greedy=self._sampling.greedy or member >= self._num_sampled
            ),
        )


def _digest_starts(starts: Sequence[TaskStart], kinds: Sequence[str] | None) -> str:
    """Digest the starts and their order.

    Settings of the environment, such as the path of its files, may change.
    """
    finished = [
        (start.env.id, start.task, start.seed, _make_comparable(start.options)) for start in starts
    ]
    return hashlib.blake2b(repr((finished, kinds)).encode(), digest_size=8).hexdigest()


def _make_comparable(value: Any) -> Any:
    """Return a value whose `repr` is the same in every process and differs for other values.

    Objects give their type.
    """
    if isinstance(value, Mapping):
        return sorted((repr(key), _make_comparable(inner)) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return [_make_comparable(inner) for inner in value]
    if isinstance(value, np.ndarray):
        return (
            value.dtype.str,
            value.shape,
            hashlib.blake2b(np.ascontiguousarray(value).tobytes()).hexdigest(),
        )
    if isinstance(value, (str, bytes, int, float, np.generic, NoneType)):
        return value.item() if isinstance(value, np.generic) else value
    return type(value).__qualname__


def _interleave_kinds(order: Sequence[int], kinds: Sequence[str]) -> list[int]:
    """Return the starts in the order they had, with each kind spread evenly over the epoch."""
    of_kind: dict[str, list[int]] = {}
    for start in order:
        of_kind.setdefault(kinds[start], []).append(start)
    # Each kind's starts at even distances: a shuffle has stretches of one kind, in which the engine
    # and the environments of the other would be idle.
    numbered = [
        ((index + 0.5) / len(starts), number, start)
        for number, (_, starts) in enumerate(sorted(of_kind.items()))
        for index, start in enumerate(starts)
    ]
    return [start for _, _, start in sorted(numbered)]
