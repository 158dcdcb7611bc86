"""Each rank of a learner has a GPU of its own on a host that learns, or a place among CPUs."""

import pytest

from vla_rl.cluster.hosts import Gpu, Host, HostResources
from vla_rl.cluster.rank_places import gpus_that_learn, rank_places, without_hosts
from vla_rl.errors import ConfigError


def host(name: str, gpus: int) -> Host:
    gpu = Gpu(name="H100", memory_bytes=80)
    return Host(
        name=name, resources=HostResources(num_cores=8, memory_bytes=64, gpus=(gpu,) * gpus)
    )


HOSTS = (host("desk", 2), host("node1", 4), host("node2", 4))


def places(*learners: str, ranks: int, hosts: tuple[Host, ...] = HOSTS, **others) -> list[tuple]:
    found = rank_places(learners, hosts, ranks, **others)
    assert [place.rank for place in found] == list(range(len(found)))
    return [(place.host, place.gpu) for place in found]


def test_ranks_are_on_the_gpus_that_are_named_in_that_order() -> None:
    assert places("node2:3,0", "here", ranks=4) == [
        ("node2", 3),
        ("node2", 0),
        ("desk", 0),
        ("desk", 1),
    ]


def test_a_gpu_that_was_lost_has_no_rank() -> None:
    assert places("node1", ranks=3, lost={("node1", 1)}) == [
        ("node1", 0),
        ("node1", 2),
        ("node1", 3),
    ]


def test_more_ranks_than_gpus_are_refused_with_both_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"learner.ranks is 5, but cluster.learners 'node1' names 4 GPUs"
    ):
        places("node1", ranks=5)


def test_ranks_that_share_layers_are_on_one_host() -> None:
    assert len(places("here", "node1", ranks=6, group_size=2)) == 6
    with pytest.raises(ConfigError, match="ranks 0 to 3 would be on 'desk' and 'node1'"):
        places("here", "node1", ranks=4, group_size=4)


@pytest.mark.parametrize(
    ("learners", "message"),
    [
        (("nod1",), "names the host 'nod1', expected one of the 3 hosts .* such as 'node1'"),
        (("node1:4",), "names GPU 4 of host 'node1', which has GPUs 0 to 3"),
        (("node1:0", "node1:1"), "names the host 'node1' 2 times, expected once"),
    ],
)
def test_a_host_or_gpu_that_is_not_there_is_refused(
    learners: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        places(*learners, ranks=1)


def test_without_gpus_ranks_are_dealt_to_the_hosts_in_whole_groups() -> None:
    hosts = (host("desk", 0), host("a", 0), host("b", 0))
    assert places("a", "b", ranks=3, hosts=hosts) == [("a", None), ("a", None), ("b", None)]
    assert places("a", "b", ranks=4, hosts=hosts, group_size=4) == [("a", None)] * 4


def test_hosts_with_and_without_gpus_do_not_learn_together() -> None:
    with pytest.raises(ConfigError, match="names 'bare', which has no GPU, beside hosts that have"):
        places("node1", "bare", ranks=2, hosts=(*HOSTS, host("bare", 0)))


def test_a_host_learns_with_the_gpus_that_are_named_or_with_all() -> None:
    learners = ("node1:1-2", "node2")
    assert gpus_that_learn("node1", 4, learners) == {1, 2}
    assert gpus_that_learn("node2", 4, learners) == {0, 1, 2, 3}
    assert gpus_that_learn("node3", 4, learners) is None


def test_learners_without_a_lost_host_name_the_others_as_before() -> None:
    assert without_hosts(("node[1-2]:0-1", "here"), {"node1"}) == ("node2:0,1", "here")
