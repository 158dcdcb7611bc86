"""The monitor on each host: reports what the host has, and shows by its death that it has left."""

import asyncio
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import msgspec
from msgspec.structs import replace

import vla_rl
from vla_rl.actors import Actor, actor_method
from vla_rl.cluster.gpus import gpus_of_this_host
from vla_rl.cluster.hosts import HostResources, resources_of_this_host
from vla_rl.errors import ConfigError

COMPARED: Final = ("vla_rl", "torch", "python")
"""Versions that must be equal on all hosts. Weights, observations and log-probs of one host are
used on another, so that a difference would bias what is learnt, and show nowhere."""


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """Versions and resources of one host."""

    versions: dict[str, str]
    """Versions of `COMPARED`, such as `{"torch": "2.13.0+cpu"}`; `none` if it is not installed."""

    resources: HostResources
    node: str
    """Name of the machine."""


class HostMonitor(Actor):
    """An actor that does nothing but be there, in a process of its own on each host."""

    async def report(self) -> HostReport:
        """Return the versions and resources of this host, with its GPUs."""
        report = report_of_this_host()
        gpus = await asyncio.to_thread(gpus_of_this_host)
        return replace(report, resources=replace(report.resources, gpus=gpus))

    @actor_method(concurrent=True)
    async def stay(self) -> None:
        """Never return: the call fails once this process, its host or the cable is gone."""
        await asyncio.get_running_loop().create_future()


def report_of_this_host() -> HostReport:
    """Return the versions and resources of this host, without GPUs."""
    return HostReport(
        versions={
            "vla_rl": vla_rl.__version__,
            "torch": _version_of("torch"),
            "python": ".".join(platform.python_version_tuple()[:2]),
        },
        resources=resources_of_this_host(),
        node=platform.node(),
    )


def require_same_versions(host: str, there: HostReport, here: HostReport) -> None:
    """Raise ConfigError that names each version in which a host differs from this one."""
    different = [
        f"{name} {there.versions.get(name)} (here {here.versions[name]})"
        for name in COMPARED
        if there.versions.get(name) != here.versions[name]
    ]
    if different:
        raise ConfigError(
            f"host {host!r} has {', '.join(different)}; expected the same versions on all hosts. "
            f"Install them there, and start `vla-rl host` again"
        )


def _version_of(package: str) -> str:
    # not imported: torch takes two seconds, and the monitor's process would hold it for ever
    try:
        # without the build, such as +cpu: hosts with and without a GPU act for one learner
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "none"
