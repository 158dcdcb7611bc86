"""The role of each GPU of a run: whether it learns, acts, or both."""

import difflib
from collections.abc import Sequence

import msgspec

from vla_rl.cluster.gpu_ranges import spell_indices
from vla_rl.cluster.hosts import Host
from vla_rl.cluster.layout_config import LayoutConfig
from vla_rl.errors import ConfigError


class GpuRole(msgspec.Struct, frozen=True):
    """The role of one GPU, or of a host's CPU if no host has a GPU."""

    host: str
    gpu: int | None
    learns: bool
    acts: bool


def roles_of(config: LayoutConfig, hosts: Sequence[Host]) -> tuple[GpuRole, ...]:
    """Return the role of every GPU, by host and index.

    Raises: ConfigError if there is no host, two have one name, `config` names a GPU that is not
    there or names it twice, or no GPU is left to act.
    """
    _require_names(hosts)
    gpus = _gpus_of(hosts)
    if config.mode == "together":
        return tuple(GpuRole(host, gpu, True, True) for host, gpu in gpus)
    learning = _named(config, hosts) if config.learners else _counted(config, gpus)
    if config.mode == "apart" and len(learning) == len(gpus):
        raise ConfigError(
            f"{len(learning)} of {len(gpus)} GPUs learn, expected at most {len(gpus) - 1} with "
            f"mode 'apart': none is left to act on {hosts[-1].name!r} or any other host; let fewer "
            "learn, or take the mode 'both' or 'together'"
        )
    return tuple(
        GpuRole(
            host, gpu, (host, gpu) in learning, config.mode == "both" or (host, gpu) not in learning
        )
        for host, gpu in gpus
    )


def _require_names(hosts: Sequence[Host]) -> None:
    names = [host.name for host in hosts]
    if not names:
        raise ConfigError("0 hosts, expected at least 1: a run needs a place")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"{names.count(twice)} hosts have the name {twice!r}, expected 1; give each its own"
        )


def _gpus_of(hosts: Sequence[Host]) -> list[tuple[str, int | None]]:
    gpus: list[tuple[str, int | None]] = [
        (host.name, index) for host in hosts for index in range(len(host.resources.gpus))
    ]
    return gpus or [(host.name, None) for host in hosts]


def _counted(
    config: LayoutConfig, gpus: Sequence[tuple[str, int | None]]
) -> set[tuple[str, int | None]]:
    names = list(dict.fromkeys(host for host, _ in gpus))
    count = config.num_learner_hosts or 0
    if count > len(names):
        raise ConfigError(
            f"LayoutConfig.num_learner_hosts is {count}, expected <= {len(names)}, the number of "
            f"hosts with GPUs, of which {names[-1]!r} is the last; lower it or add hosts"
        )
    return {(host, gpu) for host, gpu in gpus if host in names[:count]}


def _named(config: LayoutConfig, hosts: Sequence[Host]) -> set[tuple[str, int | None]]:
    by_name = {host.name: len(host.resources.gpus) for host in hosts}
    has_gpus = any(by_name.values())
    learning: set[tuple[str, int | None]] = set()
    for part in config.learner_ranges():
        if part.host not in by_name:
            near = difflib.get_close_matches(part.host, by_name, n=1) or list(by_name)[:1]
            raise ConfigError(
                f"LayoutConfig.learners names the host {part.host!r}, expected one of the "
                f"{len(by_name)} hosts of this run, such as {near[0]!r}"
            )
        count = by_name[part.host]
        if (has_gpus and not count) or (part.gpus and max(part.gpus) >= count):
            wanted = "a GPU" if part.gpus is None else f"GPU {spell_indices(part.gpus)}"
            there = f"GPUs 0 to {count - 1}" if count else "no GPU"
            raise ConfigError(
                f"LayoutConfig.learners names {wanted} of host {part.host!r}, which has {there}; "
                "name GPUs that are there"
            )
        indices: Sequence[int | None] = range(count) if part.gpus is None else part.gpus
        for index in indices if has_gpus else (None,):
            if (part.host, index) in learning:
                raise ConfigError(
                    f"LayoutConfig.learners names GPU {index} of host {part.host!r} twice, "
                    "expected once"
                )
            learning.add((part.host, index))
    return learning
