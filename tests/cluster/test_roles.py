"""Each GPU learns, acts, or does both, as the mode says."""

import pytest

from vla_rl.cluster.hosts import Gpu, Host, HostResources
from vla_rl.cluster.layout_config import LayoutConfig
from vla_rl.cluster.roles import roles_of
from vla_rl.errors import ConfigError


def host(name: str, gpus: int) -> Host:
    gpu = Gpu(name="H100", memory_bytes=80)
    return Host(
        name=name, resources=HostResources(num_cores=8, memory_bytes=64, gpus=(gpu,) * gpus)
    )


def roles(config: LayoutConfig, *hosts: Host) -> list[str]:
    """Return the roles as words, such as `a0 learns+acts`."""
    return [
        f"{role.host}{'' if role.gpu is None else role.gpu} "
        + "+".join(word for word, does in (("learns", role.learns), ("acts", role.acts)) if does)
        for role in roles_of(config, hosts)
    ]


def test_together_every_gpu_does_both() -> None:
    assert roles(LayoutConfig(), host("a", 1), host("b", 1)) == ["a0 learns+acts", "b0 learns+acts"]


def test_apart_a_gpu_does_one_of_both() -> None:
    config = LayoutConfig(mode="apart", learners=("a:1",))
    assert roles(config, host("a", 2), host("b", 1)) == ["a0 acts", "a1 learns", "b0 acts"]


def test_in_the_mode_both_the_learners_act_too() -> None:
    config = LayoutConfig(mode="both", num_learner_hosts=1)
    assert roles(config, host("a", 1), host("b", 1)) == ["a0 learns+acts", "b0 acts"]


def test_a_host_without_gpus_has_no_role_beside_hosts_that_have_some() -> None:
    assert roles(LayoutConfig(), host("a", 0), host("b", 1)) == ["b0 learns+acts"]
    assert roles(LayoutConfig(), host("a", 0), host("b", 0)) == ["a learns+acts", "b learns+acts"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LayoutConfig(mode="apart", learners=("a", "b")), "3 of 3 GPUs learn, expected at most 2"),
        (LayoutConfig(mode="both", num_learner_hosts=3), "num_learner_hosts is 3, expected <= 2"),
        (LayoutConfig(mode="both", learners=("c",)), "names the host 'c', expected one of the 2"),
        (LayoutConfig(mode="both", learners=("a:2",)), "names GPU 2 of host 'a', which has GPUs 0"),
        (LayoutConfig(mode="both", learners=("a:0", "a")), "names GPU 0 of host 'a' twice"),
    ],
)
def test_roles_that_cannot_be_given_are_refused(config: LayoutConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        roles(config, host("a", 2), host("b", 1))


def test_hosts_have_names_of_their_own() -> None:
    with pytest.raises(ConfigError, match="2 hosts have the name 'a'"):
        roles(LayoutConfig(), host("a", 1), host("a", 1))
    with pytest.raises(ConfigError, match="0 hosts, expected at least 1"):
        roles(LayoutConfig())
