"""Choose the player that fits an environment of the package verifiers, or explain why none does.

    verifiers   0.1.9 ... 0.1.x   0.2   0.3   0.4
    classic     yes               yes   yes              a module with `load_environment`
    v1                            yes   yes   yes        a module that exports a Taskset

Runs in any interpreter that has verifiers; only here is it imported.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

from vla_rl.endpoint.verifiers.classic import Classic
from vla_rl.endpoint.verifiers.played import Player
from vla_rl.endpoint.verifiers.tasksets import EpisodesOf02, EpisodesOf03
from vla_rl.errors import ConfigError


def player_of(env_id: str, arguments: dict[str, Any], max_rows: int | None) -> Player:
    """Return the player that fits an environment and the installed verifiers.

    Raises: ConfigError, with the cause, if verifiers is missing or too old, or the module is not an
    environment of it.
    """
    verifiers = _imported("verifiers")
    reason = "this verifiers has no v1 environments"
    if (v1 := _v1_of(verifiers)) is not None:
        try:
            module = v1.import_taskset(env_id)
            names = getattr(module, "__all__", ())
            if any(_is_taskset(v1, getattr(module, name, None)) for name in names):
                return (EpisodesOf03 if hasattr(v1, "load_environment") else EpisodesOf02)(
                    env_id, arguments, max_rows
                )
            reason = f"{module.__name__} exports no Taskset by its `__all__`, as v1 environments do"
        except ModuleNotFoundError as error:
            # the classic loader may know more about a module without a Taskset, such as where to
            # find it
            reason = told(error)
    try:
        load = verifiers.load_environment
    except (AttributeError, ImportError) as error:
        raise ConfigError(
            f"verifiers {verifiers.__version__} cannot load {env_id!r}: {reason}; and its "
            f"load_environment, for classic environments, is missing: {told(error)}"
        ) from error
    return Classic(env_id, arguments, load)


def told(error: BaseException) -> str:
    """Format an error with its causes, the first cause last.

    A loader's own message often hides what was missing.
    """
    found: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        found.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return ", because of ".join(dict.fromkeys(found))


def _imported(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise ConfigError(f"the package verifiers cannot be imported: {told(error)}") from error
        raise ConfigError(
            "a verifiers environment needs verifiers; run `pip install 'verifiers>=0.1.9,<0.5'` in "
            "this interpreter, or name one that has it: VerifiersConfig(python=...)"
        ) from error


def _v1_of(verifiers: ModuleType) -> Any:
    """Return the module of v1 environments, in versions that have it in a supported form."""
    try:
        v1 = import_module("verifiers.v1")
    except ModuleNotFoundError as error:
        if error.name != "verifiers.v1":
            raise ConfigError(
                f"verifiers {verifiers.__version__} cannot be imported completely: {told(error)}"
            ) from error
        return None
    return v1 if hasattr(v1, "import_taskset") and hasattr(v1, "ModelContext") else None


def _is_taskset(v1: Any, exported: Any) -> bool:
    return isinstance(exported, type) and issubclass(
        exported, (v1.Taskset, *filter(None, [getattr(v1, "Env", None)]))
    )
