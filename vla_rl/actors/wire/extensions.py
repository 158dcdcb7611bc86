"""Classes of other libraries that messages may hold, such as tensors between learner and ranks.

    value ─► plain content ─► msgpack extension with its number ─► plain content ─► value

The content goes through the codec too: its arrays travel as all arrays do. A class that was not registered is
refused, by the sender with a TypeError and by the receiver as a malformed message.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

from vla_rl.actors.wire.envelope import MalformedMessage

T = TypeVar("T")

FIRST_EXTENSION: Final = 16
"""Smallest number of an extension; those below are the codec's own."""

LAST_EXTENSION: Final = 127
"""Largest number that msgpack leaves to applications."""

EXTENDED: Final[dict[type, tuple[int, Callable[[Any], Any]]]] = {}
"""Number of each registered class, and what returns its values' content."""

_from_plain: dict[int, Callable[[Any], Any]] = {}


def register_extension(
    code: int, kind: type[T], to_plain: Callable[[T], Any], from_plain: Callable[[Any], T]
) -> None:
    """Let values of a class that msgspec does not know be sent, by every codec of this process.

    Call it in the module that declares the messages, which sender and receiver both import.

    Args:
        code: number of the extension on the wire, 16 to 127.
        kind: the class; values of its subclasses are not sent.
        to_plain: returns a value's content as what can be sent, arrays included.
        from_plain: makes a value of its content, whose arrays are read-only, and hold shared memory.

    Raises: ValueError for a number that is taken.
    """
    # a number and not the order of registration: both processes have to mean the same class, and
    # import modules in orders of their own
    if not FIRST_EXTENSION <= code <= LAST_EXTENSION or code in _from_plain:
        raise ValueError(f"extension {code} is taken, expected another number from 16 to 127.")
    EXTENDED[kind], _from_plain[code] = (code, to_plain), from_plain


def restore_value(code: int, content: Any) -> Any:
    """Return the value that has this content. Raises: MalformedMessage for an unknown extension."""
    if code not in _from_plain:
        raise MalformedMessage(f"extension {code} is unknown.")
    return _from_plain[code](content)
