"""Registry of text environments: a short table of ids, and any class by `module:Class`."""

import difflib
import importlib
import inspect
import typing
from typing import Any, Final

import msgspec

from vla_rl.envs.text.task import TextTask
from vla_rl.errors import ConfigError
from vla_rl.types import EnvSpec

_REGISTRY: Final[dict[str, str]] = {}


def register_text_task(task_id: str, path: str) -> None:
    """Register `module:Class` as `task_id`, such as `text/arithmetic`.

    Raises: ValueError if the id is taken by another class.
    """
    if ":" not in path or ":" in task_id:
        raise ValueError(
            f"{task_id!r} at {path!r}: expected an id without a colon, and `module:Class`."
        )
    if _REGISTRY.setdefault(task_id, path) != path:
        raise ValueError(
            f"{task_id!r} is {_REGISTRY[task_id]!r} already; choose another id for {path!r}."
        )


def text_task_ids() -> tuple[str, ...]:
    """Return all registered ids."""
    return tuple(sorted(_REGISTRY))


def is_text_task(spec: EnvSpec) -> bool:
    """Return whether this is a text environment: registered here, or a `module:Class` of one."""
    if spec.id in _REGISTRY:
        return True
    module, _, name = spec.id.partition(":")
    found = getattr(_module(module, spec.id), name, None) if name and "/" not in spec.id else None
    return isinstance(found, type) and issubclass(found, TextTask)


def make_text_task(spec: EnvSpec) -> TextTask:
    """Make a new task.

    Raises: ConfigError for an unknown id, class or keyword, with the nearest match, or a wrong
    value.
    """
    if spec.wrappers:
        raise ConfigError(
            f"{spec.id!r} is a text environment, which takes no wrappers of "
            f"gymnasium: {spec.wrappers}"
        )
    task_class = text_task_class(spec.id)
    kwargs = _checked_kwargs(task_class, spec)
    try:
        return task_class(**kwargs)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{spec.id!r} cannot be made from {spec.kwargs}: {error}") from error


def text_task_class(task_id: str) -> type[TextTask]:
    """Return the class of an id or a `module:Class`. Raises: ConfigError with the nearest match."""
    path = _REGISTRY.get(task_id, task_id)
    if ":" not in path:
        near = difflib.get_close_matches(task_id, _REGISTRY, n=1, cutoff=0.4)
        hint = f" did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"text environment {task_id!r} is unknown;{hint} known are: "
            f"{', '.join(text_task_ids())}, and any `module:Class` of your own."
        )
    module_name, _, class_name = path.partition(":")
    module = _module(module_name, task_id)
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, TextTask)):
        classes = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, TextTask)
        ]
        near = difflib.get_close_matches(class_name, classes, n=1)
        hint = f" did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"text environment {task_id!r}: {module_name!r} has no TextTask {class_name!r};{hint}"
        )
    return found


def _module(name: str, task_id: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"text environment {task_id!r}: module {error.name!r} cannot be found; is it on the "
            "path?"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"text environment {task_id!r} names no module before the colon: {error}"
        ) from error


def _checked_kwargs(task_class: type[TextTask], spec: EnvSpec) -> dict[str, Any]:
    """Convert keyword arguments to their type hints: a list becomes a tuple, a text a path."""
    parameters = inspect.signature(task_class).parameters
    hints = typing.get_type_hints(task_class.__init__)
    checked = {}
    for name, value in spec.kwargs.items():
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1, cutoff=0.4)
            hint = f" did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{spec.id!r} takes no {name!r};{hint} it takes: "
                f"{', '.join(parameters) or 'nothing'}."
            )
        try:
            checked[name] = msgspec.convert(value, hints.get(name, Any), strict=True)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{name!r} of {spec.id!r} is {value!r}: {error}") from error
    return checked
