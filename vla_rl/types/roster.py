"""The members of a team: the policies that learn in one run, by name, and the decisions of each.

A run always trains a team. If it has one policy, the team's only member is `policy`, which acts for
every agent whatever that agent's name; its metrics, files and seeds carry no member's name. In any
other team, each member acts for the agent of its own name.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from vla_rl.errors import ConfigError
from vla_rl.types.agent_parts import AgentPart, agents_of, parts_of
from vla_rl.types.language import DEFAULT_AGENT, LanguagePolicies, LanguagePolicy
from vla_rl.types.seeds import derive_seed
from vla_rl.types.trajectory import Trajectory

SOLE_MEMBER: Final = DEFAULT_AGENT
"""Name of the member of a team of one, which acts for every agent."""


class Roster:
    """The names of a team's members, in order.

    Args:
        names: the names; `SOLE_MEMBER` alone is a member that acts for every agent.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Roster) and set(self.names) == set(other.names)

    def __hash__(self) -> int:
        return hash(frozenset(self.names))

    def __str__(self) -> str:
        return (
            "one policy for all agents"
            if self.acts_for_all
            else f"the policies of agents {sorted(self.names)}"
        )

    @property
    def acts_for_all(self) -> bool:
        """Whether the team has one policy, for agents of any name."""
        return self.names == (SOLE_MEMBER,)

    def member_of(self, agent: str) -> str:
        """Return the name of the member that acts for an agent. Raises: KeyError if none does."""
        if self.acts_for_all:
            return SOLE_MEMBER
        if agent not in self.names:
            raise KeyError(agent)
        return agent

    def prefix(self, name: str) -> str:
        """Return the beginning of a member's metrics and tensors: "" in a team of one."""
        # runs of one policy were written before there were teams; their names have to stay
        return "" if self.acts_for_all else f"{name}/"

    def seed(self, seed: int, name: str) -> int:
        """Return a member's own seed below `seed`: `seed` itself in a team of one."""
        return seed if self.acts_for_all else derive_seed(seed, name)

    def parts_of(self, trajectories: Sequence[Trajectory], name: str) -> list[AgentPart]:
        """Return a member's part in each episode in which it decided."""
        if not self.acts_for_all:
            return parts_of(trajectories, name)
        return [
            AgentPart(row=row, decisions=tuple(range(len(each.steps))), trajectory=each)
            for row, each in enumerate(trajectories)
        ]

    def require_all(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise ConfigError for a decision of an agent that no member acts for."""
        unknown = sorted(set(agents_of(trajectories)) - set(self.names))
        if unknown and not self.acts_for_all:
            raise ConfigError(
                f"agent {unknown[0]!r} has no policy, there are policies for "
                f"{sorted(self.names)}; expected one for each agent that the environment names"
            )


def by_member(policies: LanguagePolicies) -> Mapping[str, LanguagePolicy]:
    """Return policies by member name; one policy for all agents is a team of one."""
    return policies if isinstance(policies, Mapping) else {SOLE_MEMBER: policies}
