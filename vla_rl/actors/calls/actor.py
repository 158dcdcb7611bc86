"""Actors: classes whose public async methods can be called by messages.

Both ends of a connection read the table of these methods.

The table is derived from the class alone: names, annotations and `@actor_method` marks. It decides how
arguments and results are decoded, so a message can only contain what a signature declares.
"""

import hashlib
import inspect
import typing
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from vla_rl.util.imports import main_module_name

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__vla_rl_actor_method__"
_STREAM_TYPES = (AsyncIterator, AsyncGenerator, AsyncIterable)


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """Options that `@actor_method` sets on one method."""

    concurrent: bool = False
    deadline_s: float | None = None


class Actor:
    """A class that owns some state and is reached by messages only.

    Public `async def` methods are actor methods; a public async generator is one that streams. One
    message is handled at a time, in the order in which the caller sent them, unless the method is
    marked `@actor_method(concurrent=True)`. The constructor takes what the actor needs and does no I/O;
    `on_start` may. Arguments, including those of the constructor, may be anything that msgspec can
    encode by type, and NumPy arrays; received arrays are read-only.
    """

    async def on_start(self) -> None:
        """Run in the actor's own loop before its first message.

        `spawn` waits for it and raises what it raises.
        """

    async def on_stop(self) -> None:
        """Run once, after the last message, if the actor is stopped; not if it is killed.

        An exception raised here is logged as an error in the owner's process; the actor ends
        anyway.
        """


def actor_method(*, concurrent: bool = False, deadline_s: float | None = None) -> Callable[[F], F]:
    """Mark an actor method that differs from the default.

    Args:
        concurrent: start it as soon as its message arrives, without waiting for other calls.
        deadline_s: replaces the actor's own `deadline_s` for this method, e.g. for a reset that
            may take a minute.
    """
    if deadline_s is not None and not deadline_s > 0:
        raise ValueError(
            f"deadline_s is {deadline_s}, expected more than 0 seconds; leave it out "
            "for the actor's own."
        )

    def mark(method: F) -> F:
        setattr(method, _MARK, MethodOptions(concurrent, deadline_s))
        return method

    return mark


@dataclass(frozen=True, slots=True)
class ActorMethod:
    """One entry of the table."""

    index: int
    name: str
    label: str
    """`Counter.add`, for messages that people read."""
    signature: inspect.Signature
    args_type: Any
    """`tuple[...]` of the annotated parameter types, in order."""
    result_type: Any
    """Annotated type of the result, or of one item of a stream."""
    is_stream: bool
    concurrent: bool
    deadline_s: float | None
    keyword_only: tuple[str, ...]
    num_plain_args: int
    """Number of arguments with which a call needs no binding; -1 if it always does."""

    @property
    def is_plain(self) -> bool:
        """Whether it answers once, in its turn, and takes its arguments by position."""
        return self.num_plain_args >= 0 and not self.is_stream and not self.concurrent

    def bind_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return all arguments in the order of the signature, defaults filled in.

        Raises: TypeError if they do not fit.
        """
        if not kwargs and len(args) == self.num_plain_args:
            return args
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.label}{self.signature}: {error}.") from None
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def call_function(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call `function` with the arguments that `bind` returned."""
        if not self.keyword_only:
            return function(*args)
        num_positional = len(args) - len(self.keyword_only)
        named = dict(zip(self.keyword_only, args[num_positional:], strict=True))
        return function(*args[:num_positional], **named)


@dataclass(frozen=True, slots=True)
class MethodTable:
    """The methods of one actor class that messages can call, and its constructor."""

    actor_class: type[Actor]
    methods: tuple[ActorMethod, ...]
    by_name: dict[str, ActorMethod]
    constructor: ActorMethod
    fingerprint: str
    """Equal on both ends exactly if names, order and annotations are equal."""


def get_import_path(actor_class: type[Actor]) -> str:
    """Return `module:qualname`, by which a child or a host finds the class.

    Raises: TypeError for a local class.
    """
    module, qualname = actor_class.__module__, actor_class.__qualname__
    if "<locals>" in qualname:
        raise TypeError(
            f"{module}.{qualname} is defined inside a function, so no other process can import it; "
            f"move the class to the top level of a module, or place it InLoop()."
        )
    return f"{main_module_name() if module == '__main__' else module}:{qualname}"


_tables: dict[type[Actor], MethodTable] = {}


def get_method_table(actor_class: type[Actor]) -> MethodTable:
    """Return the method table of a class, made once.

    Raises: TypeError if a signature cannot be sent over a wire.
    """
    table = _tables.get(actor_class)
    if table is None:
        table = _tables[actor_class] = _make_table(actor_class)
    return table


def _make_table(actor_class: type[Actor]) -> MethodTable:
    if not (isinstance(actor_class, type) and issubclass(actor_class, Actor)):
        raise TypeError(
            f"{actor_class!r} is not an actor class; derive it from vla_rl.actors.Actor."
        )
    names = sorted(name for name in dir(actor_class) if _is_method(actor_class, name))
    methods = tuple(
        _describe_method(actor_class, index, name, getattr(actor_class, name))
        for index, name in enumerate(names)
    )
    constructor = _describe_method(actor_class, 0, "__init__", actor_class.__init__)
    described = "\n".join(
        f"{entry.name}{entry.signature}{entry.is_stream}" for entry in (constructor, *methods)
    )
    fingerprint = hashlib.sha256(described.encode()).hexdigest()[:16]
    return MethodTable(
        actor_class, methods, {entry.name: entry for entry in methods}, constructor, fingerprint
    )


def _is_method(actor_class: type[Actor], name: str) -> bool:
    if name.startswith("_") or hasattr(Actor, name):
        return False
    method = inspect.getattr_static(actor_class, name)
    return inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)


def _describe_method(
    actor_class: type[Actor], index: int, name: str, method: Callable[..., Any]
) -> ActorMethod:
    label = f"{actor_class.__name__}.{name}"
    if method is object.__init__:
        signature, hints = inspect.Signature(), {}
    else:
        full = inspect.signature(method)
        signature = full.replace(parameters=list(full.parameters.values())[1:])
        try:
            hints = typing.get_type_hints(method)
        except NameError as error:
            raise TypeError(
                f"{label} has an annotation that cannot be resolved: {error}."
            ) from error
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(
                f"{label} takes *{parameter.name}; a method names each of its parameters."
            )
    arg_types = [hints.get(parameter, Any) for parameter in signature.parameters]
    is_stream = inspect.isasyncgenfunction(method)
    result_type = hints.get("return", Any)
    if is_stream and result_type is not Any:
        result_type = _get_item_type(label, result_type)
    options: MethodOptions = getattr(method, _MARK, MethodOptions())
    args_type: Any = tuple[tuple(arg_types)] if arg_types else tuple[()]  # type: ignore[misc]
    keyword_only = tuple(
        entry.name for entry in signature.parameters.values() if entry.kind is entry.KEYWORD_ONLY
    )
    return ActorMethod(
        index=index,
        name=name,
        label=label,
        signature=signature,
        args_type=args_type,
        result_type=result_type,
        is_stream=is_stream,
        concurrent=options.concurrent,
        deadline_s=options.deadline_s,
        keyword_only=keyword_only,
        num_plain_args=-1 if keyword_only else len(arg_types),
    )


def _get_item_type(label: str, annotation: Any) -> Any:
    if typing.get_origin(annotation) not in _STREAM_TYPES:
        raise TypeError(
            f"{label} is an async generator annotated {annotation}, expected AsyncIterator[...]."
        )
    return typing.get_args(annotation)[0]
