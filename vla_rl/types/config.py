"""The base of every configuration: small, frozen, keyword-only, and closed to unknown fields."""

from typing import Any

import msgspec

from vla_rl.errors import ConfigError


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A configuration. Subclasses say `frozen=True, kw_only=True` again (msgspec does not hand the second down) and check
    themselves in `__post_init__` with `require`; nothing is edited after it is built.

    Fields are documented by a string under each of them; the command line shows that string as the option's help.
    """

    def require(self, condition: bool, field: str, expected: str) -> None:
        """Raise `ConfigError` naming the field, its value and what was expected, unless `condition` holds."""
        if not condition:
            value: Any = getattr(self, field)
            raise ConfigError(f"{type(self).__name__}.{field} is {value!r}, expected {expected}")
