"""What failed once decides who takes the next version from whom."""

import pytest

from vla_rl.errors import ActorDied, HostNotReached, WeightsNotGiven
from vla_rl.remote_rollout.chain_broadcast import Hop, Reachability

REFUSED = HostNotReached("a refuses the connection")


def test_a_host_that_has_a_part_comes_first_and_one_that_no_rank_reaches_last() -> None:
    reach = Reachability()
    assert reach.in_order(["a:0", "b", "c"], {"b"}) == ["b", "a:0", "c"]
    reach.note_not_reached({"b": HostNotReached("b refuses the connection")})
    assert reach.in_order(["a:0", "b", "c"], {"b"}) == ["a:0", "c", "b"]


def test_a_host_that_no_rank_reaches_is_an_error_that_passes_while_there_is_another() -> None:
    reach = Reachability()
    with pytest.raises(WeightsNotGiven, match="a refuses the connection") as raised:
        reach.require_reached({"a:1": REFUSED}, ["a:0", "a:1", "b"])
    assert type(raised.value) is WeightsNotGiven
    with pytest.raises(HostNotReached, match="b refuses"):
        reach.require_reached({"b": HostNotReached("b refuses")}, ["a:0", "a:1", "b"])


def test_other_failures_say_nothing_of_the_way() -> None:
    reach = Reachability()
    failed = {"a": ActorDied("a", 1, "killed"), "b": WeightsNotGiven("newer ones are there")}
    assert reach.note_not_reached(failed) == []
    reach.require_reached(failed, ["a", "b"])
    assert reach.in_order(["a", "b", "c"], ()) == ["a", "b", "c"]


def test_machines_that_cannot_connect_do_not_take_from_each_other() -> None:
    reach = Reachability()
    assert reach.planned(["a", "b"])[1] == Hop(host="b", source="a")
    reach.unreachable.add(("b", "a"))
    assert reach.planned(["a", "b"])[1] == Hop(host="b")
    assert reach.planned(["b"], having=["a"]) == (Hop(host="b"),)
