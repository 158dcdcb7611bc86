"""Which hosts can be reached from where, as far as attempts have shown. No task and no clock.

HostNotReached ────────► no rank reaches that machine: another one takes the next version first
Taken.is_unreachable ──► two machines cannot connect: one takes nothing from the other
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from vla_rl.errors import HostNotReached, WeightsNotGiven
from vla_rl.remote_rollout.delivery_plan import Delivery, deliveries, machine_of


class Reach:
    """Ways of weights to hosts, as far as attempts to bring them have shown.

    Attributes:
        unreachable: pairs (taker, giver) of machines that cannot connect; those that are found are
            added.
    """

    def __init__(self) -> None:
        self.unreachable: set[tuple[str, str]] = set()
        self._not_reached: set[str] = set()

    def planned(self, wanting: Sequence[str], having: Sequence[str] = ()) -> tuple[Delivery, ...]:
        """Return a delivery for each host that wants a version: see `deliveries`."""
        return deliveries(wanting, having, self.unreachable)

    def in_order(self, hosts: Iterable[str], machines: Collection[str]) -> list[str]:
        """Return hosts, the one that takes a version from its origin first.

        Args: `machines`, those that have a part of the version.
        """

        def rank(name: str) -> tuple[bool, bool]:
            # a part that is on the machine already uses no cable
            machine = machine_of(name)
            return machine in self._not_reached, machine not in machines

        return sorted(hosts, key=rank)

    def require_reached(self, failed: Mapping[str, BaseException], hosts: Iterable[str]) -> None:
        """Note hosts that no rank can reach: another one of `hosts` takes the next version first.

        Raises: WeightsNotGiven if there are any; HostNotReached if there is no other.
        """
        for error in self.note_not_reached(failed):
            is_hopeless = {machine_of(name) for name in hosts} <= self._not_reached
            raise error if is_hopeless else WeightsNotGiven(str(error))

    def note_not_reached(self, failed: Mapping[str, BaseException]) -> list[HostNotReached]:
        """Note the machines that no rank can reach; return their errors."""
        faults = {
            name: error for name, error in failed.items() if isinstance(error, HostNotReached)
        }
        self._not_reached |= {machine_of(name) for name in faults}
        return list(faults.values())
