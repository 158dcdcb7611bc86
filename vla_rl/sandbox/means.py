"""The means of isolation by name, and what calls can do to the machine without some of them.

namespaces   its own processes, System V memory and network; all its processes die with the first
mounts       all files read-only except its folder and /dev/shm, which are in memory and limited in
             size
own_user     if root runs it: a user of its own
landlock     it writes only in its folder, and signals only its own processes
seccomp      no sockets without a network; no memory and no objects outside of its processes; no
             extended attributes
"""

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, get_args

Means: TypeAlias = Literal["namespaces", "mounts", "own_user", "landlock", "seccomp"]

ALL_MEANS: Final[frozenset[Means]] = frozenset(get_args(Means))


def usable_means(*, is_root: bool, without: tuple[Means, ...]) -> frozenset[Means]:
    """Return the means to try.

    Mounts need namespaces, and only root can give a call a user of its own.
    """
    means = ALL_MEANS.difference(without, () if is_root else ("own_user",))
    return means if "namespaces" in means else means - {"mounts"}


def open_to_calls(means: frozenset[Means], *, signals_are_confined: bool) -> list[str]:
    """List in words the unwanted actions that calls can do with these means.

    Args:
        means: the means that are used.
        signals_are_confined: whether this kernel's Landlock keeps signals inside.
    """
    found = []
    if means.isdisjoint(("mounts", "own_user", "landlock")):
        found.append("write wherever this user can")
    elif means.isdisjoint(("mounts", "own_user")):
        found.append("change modes and times of this user's files")
    elif means.isdisjoint(("mounts", "landlock")):
        found.append("write what every user can, such as new files in /tmp")
    elif means.isdisjoint(("own_user", "landlock")):
        found.append("write to devices that this user can write to")
    if means.isdisjoint(("mounts", "seccomp")) and means & {"own_user", "landlock"}:
        found.append("set attributes of files that every user can write to")
    if means.isdisjoint(("mounts", "landlock")):
        found.append("fill the disk outside of their folders")
    if means.isdisjoint(("namespaces", "own_user")) and not (
        "landlock" in means and signals_are_confined
    ):
        found.append("end this user's processes")
    if means.isdisjoint(("namespaces", "seccomp")):
        found.append("use the network, also with network=False")
    elif "seccomp" not in means:
        found.append(
            "connect to unix sockets, also with network=False, and keep memory that is not counted"
        )
    return found


def described(missing: Mapping[Means, str], found: list[str]) -> str:
    """Describe in one line the missing means and their consequences.

    Args:
        missing: means that are not used, each with the reason.
        found: actions that calls can do therefore.
    """
    reasons = ", ".join(f"{means} ({reason})" for means, reason in missing.items())
    if not found:
        return (
            f"sandboxed calls are isolated without {reasons}; the other means keep the same "
            "promises"
        )
    return (
        f"sandboxed calls can {'; '.join(found)}, as they are isolated without {reasons}. Time, "
        "memory, output and the number of processes are limited all the same, and no process "
        "outlives its call"
    )
