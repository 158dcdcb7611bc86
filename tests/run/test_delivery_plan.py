"""Weights enter each machine once, from the control process or from a neighbour."""

from hypothesis import given, strategies as st

from vla_rl.remote_rollout.chain_broadcast import Hop, machine_name, plan_hops


def test_hosts_form_a_chain_of_which_the_control_process_serves_the_first() -> None:
    assert plan_hops(["a", "b", "c"]) == (
        Hop(host="a"),
        Hop(host="b", source="a"),
        Hop(host="c", source="b"),
    )


def test_engines_of_one_machine_read_its_memory() -> None:
    assert plan_hops(["a:0", "a:1", "b:0", "b:1"]) == (
        Hop(host="a:0"),
        Hop(host="b:0", source="a:0"),
        Hop(host="a:1", source="a:0", opens_memory=True),
        Hop(host="b:1", source="b:0", opens_memory=True),
    )


def test_a_host_that_was_away_takes_the_version_from_one_that_has_it() -> None:
    assert plan_hops(["c"], having=["a", "b"]) == (Hop(host="c", source="b"),)
    assert plan_hops(["a:1"], having=["a:0", "b"]) == (
        Hop(host="a:1", source="a:0", opens_memory=True),
    )


def test_a_host_that_cannot_reach_its_neighbour_takes_from_the_control_process() -> None:
    planned = plan_hops(["a", "b", "c"], unreachable={("b", "a")})
    assert [each.source for each in planned] == [None, None, "b"]


names = st.builds("{}:{}".format, st.sampled_from("abcd"), st.integers(0, 3))


@given(
    st.lists(names, unique=True),
    st.sets(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd"))),
)
def test_each_host_gets_one_delivery_after_its_source_and_none_serves_two_machines(
    wanting: list[str], unreachable: set[tuple[str, str]]
) -> None:
    planned = plan_hops(wanting, unreachable=unreachable)
    assert sorted(each.host for each in planned) == sorted(wanting)
    served: set[str] = set()
    between: list[str] = []
    for each in planned:
        assert each.source is None or each.source in served
        served.add(each.host)
        if each.source is None:
            continue
        is_near = machine_name(each.source) == machine_name(each.host)
        assert each.opens_memory == is_near
        if not is_near:
            assert (machine_name(each.host), machine_name(each.source)) not in unreachable
            between.append(each.source)
    assert len(between) == len(set(between))
