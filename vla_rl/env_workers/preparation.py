"""Prepare a fork server of simulators before its first fork.

It imports the environments and builds what they can share.

An environment's class may have `prepare`, a classmethod with the keyword arguments of its
constructor. It builds costly data that is never written to again, without any OpenGL, and keeps it
in its module; an instance made later with the same arguments, in a fork of this process, uses that
data.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from vla_rl.actors import PrepareHook
from vla_rl.actors.threads import refuse_threads
from vla_rl.env_workers.making import creator_of, refuse_unknown_arguments, registered
from vla_rl.errors import ConfigError, EnvError
from vla_rl.types import EnvSpec
from vla_rl.util.agreement import excerpt
from vla_rl.util.plain_values import part_without_json

_FOR_GYMNASIUM = ("max_episode_steps", "disable_env_checker")
"""Arguments that `gymnasium.make` does not pass on."""

_DRIVERS = ("_dri.so", "libgallium", "libnvidia-eglcore", "libnvidia-glcore", "libcuda.so")
"""Libraries of a process that has opened a display or a GPU; a later fork of it hangs when it
renders."""


def prepare_hook(specs: Iterable[EnvSpec]) -> PrepareHook:
    """Return the hook that prepares these environments, each of them once.

    Raises: ConfigError, naming the argument, for one that is no plain value.
    """
    specs = tuple(specs)
    for spec in specs:
        if (found := part_without_json(spec, f"the EnvSpec of {spec.id}")) is not None:
            part, value = found
            raise ConfigError(
                f"{part} is {excerpt(value)}, a {type(value).__name__}, expected numbers, strings, "
                "booleans, None, or lists and dicts of them; of an array, pass array.tolist()"
            )
    distinct = {msgspec.json.encode(spec, order="deterministic"): spec for spec in specs}
    plain = [{"id": spec.id, "kwargs": spec.kwargs} for spec in distinct.values()]
    return PrepareHook(f"{__name__}:prepare_envs", {"specs": plain})


def prepare_envs(specs: list[dict[str, Any]]) -> None:
    """Import the specs' environments, and call `prepare` if the class has it.

    Raises: EnvError naming the environment.
    """
    # "could not be made", as when it is built without a preparation: the fault is the same
    for spec in specs:
        try:
            _prepare(spec["id"], spec["kwargs"])
        except EnvError:
            raise
        except (
            Exception,
            SystemExit,
        ) as error:  # each error of the environment's code is its own fault
            arguments = f" with {spec['kwargs']}" if spec["kwargs"] else ""
            raise EnvError(f"{spec['id']}{arguments} could not be made: {error!r}") from error


def _prepare(env_id: str, kwargs: dict[str, Any]) -> None:
    found = registered(env_id)
    refuse_unknown_arguments(EnvSpec(id=env_id, kwargs=kwargs), found)
    prepare = getattr(creator_of(found), "prepare", None)
    if prepare is not None:
        given = {**found.kwargs, **kwargs}
        prepare(**{name: value for name, value in given.items() if name not in _FOR_GYMNASIUM})
    refuse_threads("preparing it")
    if drivers := _loaded_drivers():
        raise RuntimeError(
            f"preparing it loaded {', '.join(drivers)}: a process that has opened a display or a "
            "GPU cannot be forked; "
            'leave that to the constructor, or set start="spawn"'
        )


def _loaded_drivers() -> list[str]:
    names = {
        line.rsplit("/", 1)[-1]
        for line in Path("/proc/self/maps")
        .read_text(encoding="utf-8", errors="replace")
        .splitlines()
        if ".so" in line
    }
    return sorted(name for name in names if any(driver in name for driver in _DRIVERS))
