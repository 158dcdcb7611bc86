"""The specification of an episode, from which any process on any host can run it again.

NumPy's numbers in it become Python's own when it is made. Its seeds are derived from one run seed by name, so
that no random stream depends on how often another was used.
"""

import hashlib
import operator
from typing import Any

import msgspec

from vla_rl.types.config import ExplainsFields
from vla_rl.util.values import make_fields_plain


def derive_seed(seed: int, *path: str | int) -> int:
    """Derive a seed in [0, 2**63) for `path` below `seed`.

    Equal inputs give equal seeds on every machine and Python, and integers of NumPy the same as
    Python's own.

    Raises: TypeError for anything but integers and text.

    >>> derive_seed(7, "episode", 3) == derive_seed(7, "episode", 3) != derive_seed(7, "episode", 4)
    True
    """
    # Not Python's `hash`: it differs between processes, and between versions of Python.
    text = repr((operator.index(seed), *map(_as_plain_part, path))).encode()
    # 63 bits fit a signed integer, which torch's generators and NumPy's arrays take.
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def _as_plain_part(part: str | int) -> str | int:
    # A `numpy.str_` has another repr, and would give another seed for the same name.
    return str(part) if isinstance(part, str) else operator.index(part)


class WrapperSpec(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """A wrapper of an environment by name and plain values.

    `vla_rl.env_workers.wrapper_spec` makes it from a class.

    Example:
        WrapperSpec(path="gymnasium.wrappers:TimeLimit", kwargs={"max_episode_steps": 300})
    """

    path: str
    """`module:name` of the class, or of a function that takes an environment and returns one."""

    kwargs: dict[str, Any] = {}
    """Keyword arguments of the wrapper: numbers, strings, booleans, lists and dicts of them."""

    def __post_init__(self) -> None:
        make_fields_plain(self)


class EnvSpec(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """An environment by name and plain values, so that a child process can build it.

    Example:
        EnvSpec(id="vla_rl/libero_goal-v0", kwargs={"task_id": 3})
    """

    id: str
    """A gymnasium id, such as `vla_rl/libero_goal-v0`."""

    kwargs: dict[str, Any] = {}
    """Keyword arguments of `gymnasium.make`: numbers, strings, booleans, lists and dicts of
    them."""

    wrappers: tuple[WrapperSpec, ...] = ()
    """Wrappers applied in the process that builds the environment, the first one innermost."""

    def __post_init__(self) -> None:
        make_fields_plain(self)


class Sampling(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """Settings for choosing an action from the policy's distribution.

    Example:
        Sampling(temperature=1.6, seed=81)      # while training
        Sampling(greedy=True)                   # while evaluating
    """

    temperature: float = 1.0
    """Divisor of the logits; > 0."""

    greedy: bool = False
    """Take the most likely action; `temperature` still scales the reported log-probs."""

    by_mean: bool = False
    """With `greedy`, take the token nearest to the distribution's mean at this temperature instead of
    the likeliest: for policies whose tokens are numbers in order, all chosen at once. The likeliest of
    many bins that mean nearly the same is an accident; their mean is not. Other policies refuse it."""

    seed: int = 0
    """Seed of this one decision. The same seed, weights and observation give the same action. A
    seed that an agent passes to its policy is replaced by the decision's own, so that members of a
    group decide differently."""

    def __post_init__(self) -> None:
        make_fields_plain(self)

    def require_no_mean(self) -> None:
        """Raise ValueError if the mean is asked of a policy that does not choose all numbers at once, as
        tokens.
        """
        if self.by_mean:
            raise ValueError(
                "Sampling.by_mean is True, expected False: this policy chooses one token after another, "
                "or no tokens, so its tokens have no means; use greedy=True alone"
            )


class EpisodeSpec(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """One episode to run.

    Two specs that differ only in `episode_id`, `member` and `policy_seed` have the same start.

    Example:
        Member 2 of group 5, which starts from initial state 7:

        EpisodeSpec(episode_id=42, group_id=5, member=2, env=EnvSpec(id="vla_rl/libero_goal-v0"),
                    task="libero_goal/3", seed=11, policy_seed=97, options={"init_state_id": 7})
    """

    episode_id: int
    """Number of the episode, unique in a run, counted from 0."""

    group_id: int
    """Group of trajectories from the same task and the same start; counted from 0."""

    member: int
    """Position in the group, from 0."""

    env: EnvSpec

    task: str
    """Name under which results are reported, such as `libero_goal/3`."""

    seed: int
    """Seed of the environment: everything random about the start and the dynamics."""

    policy_seed: int
    """Seed from which each decision's `Sampling.seed` is derived; differs between members of a
    group."""

    options: dict[str, Any] = {}
    """`options` of the environment's reset, such as `{"init_state_id": 7}`."""

    sampling: Sampling = Sampling()
    """Sampling of the policy; its seed is replaced for every decision."""

    attempt: int = 0
    """Number of earlier attempts at this episode that were lost to a dead or frozen process."""

    def __post_init__(self) -> None:
        make_fields_plain(self)
