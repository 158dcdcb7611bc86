"""Whether a rank's host has the same code as this one: ranks that differ would add up nonsense."""

import hashlib
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import vla_rl
from vla_rl.errors import ConfigError

PACKAGES: Final = ("torch", "numpy", "transformers")
"""Packages whose versions must be equal, builds included."""


def code_report(policy_class: str) -> dict[str, str]:
    """Return versions of packages and digests of sources here, by name.

    Args:
        policy_class: `module:Class` of the policy.
    """
    module = policy_class.partition(":")[0]
    python = ".".join(platform.python_version_tuple()[:2])
    report = {"python": python, "vla_rl's sources": _digest_of_package()}
    report |= {package: _version_of(package) for package in PACKAGES}
    if not module.startswith("vla_rl."):
        report[f"module {module}"] = _digest_of_module(module)
    return report


def require_same_code(host: str, there: dict[str, str], here: dict[str, str]) -> None:
    """Raise ConfigError that names each thing in which the ranks' host differs from this one."""
    different = [
        f"{name} {there.get(name, 'none')} (here {found})"
        for name, found in here.items()
        if there.get(name) != found
    ]
    if different:
        raise ConfigError(
            f"host {host!r} has {', '.join(different)}; expected the same code on all hosts that "
            "learn. Install the same there, and start `vla-rl host` again"
        )


@cache
def _digest_of_package() -> str:
    folder = Path(vla_rl.__file__).parent
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _digest_of_module(name: str) -> str:
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return "none"
    return hashlib.blake2b(Path(spec.origin).read_bytes(), digest_size=6).hexdigest()


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
