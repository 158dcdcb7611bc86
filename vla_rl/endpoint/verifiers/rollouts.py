"""Rollouts of one environment of the package verifiers, in each of its versions.

    verifiers   0.1.9 ... 0.1.x   0.2   0.3   0.4
    classic     yes               yes   yes              a module with `load_environment`
    v1                            yes   yes   yes        a module that exports a Taskset

Runs in any interpreter that has verifiers. It is imported only inside functions and methods: it is large,
and often in another interpreter.
"""

import asyncio
import hashlib
import itertools
import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

import msgspec

from vla_rl.errors import ConfigError, EnvError


class RolloutResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one rollout of a verifiers environment.

    Example:
        RolloutResult(reward=1.0, is_truncated=False, stop_condition="max_turns_reached",
                      metrics={"num_turns": 2.0})
    """

    reward: float
    """Reward of the episode; if several roles are trained, the mean of theirs."""

    is_truncated: bool
    stop_condition: str
    metrics: dict[str, float]

    rewards: dict[str, float] = {}
    """Reward of each trained role by name, in an environment that has several."""


class VerifiersEnvironment(Protocol):
    """Runs rows of one environment."""

    @property
    def num_examples(self) -> int:
        """Number of rows of the data set."""
        ...

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the agents, which are the models that they request.

        Empty if there is one agent.
        """
        ...

    async def open_environment(self) -> None:
        """Load the environment and its data set."""
        ...

    async def run_rollout(self, row: int, base_url: str, api_key: str) -> RolloutResult:
        """Run one rollout whose model is at `base_url`.

        Raises: EnvError if the environment itself fails.
        """
        ...

    async def close_environment(self) -> None:
        """Release all resources."""
        ...


def select_numbers(metrics: Any) -> dict[str, float]:
    """Return the metrics that have a value."""
    return {name: float(value) for name, value in (metrics or {}).items() if value is not None}


class ClassicEnvironment:
    """An environment made by a module's `load_environment`.

    Args:
        env_id: id of the environment.
        arguments: arguments of its own `load_environment`.
        load: the `load_environment` of verifiers.
    """

    roles: tuple[str, ...] = ()

    def __init__(self, env_id: str, arguments: dict[str, Any], load: Callable[..., Any]) -> None:
        self._env_id, self._arguments, self._load = env_id, arguments, load

    async def open_environment(self) -> None:
        """Load the environment as verifiers does."""
        self._env: Any = self._load(self._env_id, **self._arguments)
        self._rows: Any = self._env.get_dataset()

    @property
    def num_examples(self) -> int:
        """Number of rows of the data set."""
        return len(self._rows)

    async def run_rollout(self, row: int, base_url: str, api_key: str) -> RolloutResult:
        """Run one rollout."""
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        # No retry and no limit of time: a reply takes as long as its engine needs, and a second
        # request would be a second turn.
        async with AsyncOpenAI(
            base_url=base_url, api_key=api_key, max_retries=0, timeout=None
        ) as client:
            state = await self._env.run_rollout(
                self._rows[row],
                OpenAIChatCompletionsClient(client),
                "policy",
                {},
                state_columns=["stop_condition"],
            )
        if state.get("error"):
            raise EnvError(f"the environment failed: {state['error']}")
        return RolloutResult(
            reward=float(state["reward"] or 0.0),
            is_truncated=bool(state["is_truncated"]),
            stop_condition=str(state.get("stop_condition") or ""),
            metrics=select_numbers(state.get("metrics")),
        )

    async def close_environment(self) -> None:
        """Do nothing: nothing is open."""


class TasksetEnvironment02:
    """A v1 environment of verifiers 0.2: a taskset and a harness.

    Args:
        env_id: id of the taskset.
        arguments: fields of its `EnvConfig`, such as `{"harness": {"id": "null"}}`.
        max_rows: most tasks of the taskset that are used; None: all.
    """

    def __init__(self, env_id: str, arguments: dict[str, Any], max_rows: int | None) -> None:
        self._env_id, self._arguments, self._max_rows = env_id, arguments, max_rows
        self.roles: tuple[str, ...] = ()
        self._tasks: list[Any] = []
        self._env: Any = None
        self._serving: asyncio.Task[None] | None = None
        self._is_over = asyncio.Event()

    async def open_environment(self) -> None:
        """Build the environment and start to serve its tools."""
        self._env = self._build()
        self._tasks = self._select()
        is_ready = asyncio.Event()
        self._serving = asyncio.create_task(
            self._serve(is_ready), name="tools of a verifiers environment"
        )
        # Serving lasts until the environment is closed, so its task is not awaited; an error ends
        # it before it is ready.
        ready = asyncio.create_task(is_ready.wait(), name="start of a verifiers environment")
        await asyncio.wait({self._serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._serving.done():
            self._serving.result()

    @property
    def num_examples(self) -> int:
        """Number of tasks of the taskset."""
        return len(self._tasks)

    async def run_rollout(self, row: int, base_url: str, api_key: str) -> RolloutResult:
        """Run one rollout."""
        import verifiers.v1 as vf
        from verifiers.v1.clients.config import EvalClientConfig

        client = vf.resolve_client(
            EvalClientConfig(base_url=base_url, api_key_var=_key_variable(api_key))
        )
        try:
            context = vf.ModelContext(model="policy", client=client, sampling=vf.SamplingConfig())
            (trace,) = await self._env.episode(self._tasks[row], context).run()
        finally:
            await client.close()
        return _make_result([trace], [])

    async def close_environment(self) -> None:
        """Stop serving."""
        self._is_over.set()
        if self._serving is not None:
            await self._serving

    def _build(self) -> Any:
        import verifiers.v1 as vf

        return vf.Environment(vf.EnvConfig.model_validate(_add_id(self._arguments, self._env_id)))

    def _select(self) -> list[Any]:
        tasks: list[Any] = self._env.taskset.select(self._max_rows)
        return tasks

    async def _serve(self, is_ready: asyncio.Event) -> None:
        """Keep the environment's services open.

        The task that entered their scopes has to leave them.
        """
        async with self._env.serving():
            is_ready.set()
            await self._is_over.wait()


class TasksetEnvironment03(TasksetEnvironment02):
    """A v1 environment of verifiers 0.3 and 0.4: a taskset and its agents."""

    async def run_rollout(self, row: int, base_url: str, api_key: str) -> RolloutResult:
        """Run one episode, in which each of several roles requests the model of its name."""
        import verifiers.v1 as vf

        client = vf.EvalClientConfig(base_url=base_url, api_key_var=_key_variable(api_key))
        episode = await self._env.run_episode(
            self._tasks[row], vf.ModelContext(model="policy", client=client)
        )
        return _make_result(list(episode.traces), list(episode.errors))

    def _build(self) -> Any:
        import verifiers.v1 as vf

        fields = _add_id(self._arguments, self._env_id)
        config = vf.resolve_env_config(fields)
        agents = {name: agent for name, agent in config if isinstance(agent, vf.AgentConfig)}
        # Roles whose model the environment pins are its own, such as a judge. The others request
        # the model of their name, by which the endpoint finds their policy.
        if len(agents) > 1:
            self.roles = tuple(name for name, agent in agents.items() if agent.model is None)
            named = {name: {**fields.get(name, {}), "model": name} for name in self.roles}
            config = vf.resolve_env_config({**fields, **named})
        return vf.load_environment(config)

    def _select(self) -> list[Any]:
        taskset = self._env.taskset
        is_bounded = getattr(taskset, "bounded", not getattr(taskset, "INFINITE", False))
        if self._max_rows is None and not is_bounded:
            raise ValueError("its taskset has no end, expected VerifiersConfig(max_rows=...)")
        return list(itertools.islice(taskset, self._max_rows))


def _add_id(arguments: dict[str, Any], env_id: str) -> dict[str, Any]:
    """Return the fields of an environment's configuration, with the id of its taskset."""
    return {**arguments, "taskset": {**arguments.get("taskset", {}), "id": env_id}}


def _key_variable(api_key: str) -> str:
    """Return the environment variable that holds a key: verifiers' clients take keys only from
    there.

    Keys are few and used again, because verifiers keeps a client for each variable. The name makes
    verifiers hide the variable from the programs of its agents.
    """
    name = f"VLA_RL_{hashlib.sha256(api_key.encode()).hexdigest()[:16].upper()}_API_KEY"
    os.environ[name] = api_key
    return name


def _make_result(traces: list[Any], errors: list[Any]) -> RolloutResult:
    """Return the outcome of an episode. Raises: EnvError for one with an error."""
    errors = [*errors, *(error for trace in traces for error in trace.errors)]
    if errors:
        raise EnvError(
            "the environment failed: "
            + "; ".join(f"{each.type}: {each.message}" for each in errors)[:2000]
        )
    # Agents that are not trained are graded too. Without any other one all count, as where there is
    # one agent.
    trained = [
        trace for trace in traces if getattr(getattr(trace, "agent", None), "trainable", True)
    ] or traces
    earned: dict[str, list[float]] = {}
    for trace in trained:
        earned.setdefault(getattr(getattr(trace, "agent", None), "name", None) or "", []).append(
            float(trace.reward)
        )
    return RolloutResult(
        reward=sum(float(trace.reward) for trace in trained) / len(trained),
        rewards={name: sum(rewards) / len(rewards) for name, rewards in earned.items() if name},
        is_truncated=any(trace.is_truncated for trace in trained),
        stop_condition=trained[-1].stop_condition or "",
        metrics={
            name: number
            for trace in trained
            for name, number in select_numbers(trace.metrics).items()
        },
    )


def find_environment(
    env_id: str, arguments: dict[str, Any], max_rows: int | None
) -> VerifiersEnvironment:
    """Return the runner that fits an environment and the installed verifiers.

    Raises: ConfigError, with the cause, if verifiers is missing or too old, or the module is not an
    environment of it.
    """
    verifiers = _import_package("verifiers")
    reason = "this verifiers has no v1 environments"
    if (v1 := _find_v1(verifiers)) is not None:
        try:
            module = v1.import_taskset(env_id)
            names = getattr(module, "__all__", ())
            if any(_is_taskset(v1, getattr(module, name, None)) for name in names):
                return (
                    TasksetEnvironment03
                    if hasattr(v1, "load_environment")
                    else TasksetEnvironment02
                )(env_id, arguments, max_rows)
            reason = f"{module.__name__} exports no Taskset by its `__all__`, as v1 environments do"
        except ModuleNotFoundError as error:
            # the classic loader may know more about a module without a Taskset, such as where to
            # find it
            reason = describe_causes(error)
    try:
        load = verifiers.load_environment
    except (AttributeError, ImportError) as error:
        raise ConfigError(
            f"verifiers {verifiers.__version__} cannot load {env_id!r}: {reason}; and its "
            f"load_environment, for classic environments, is missing: {describe_causes(error)}"
        ) from error
    return ClassicEnvironment(env_id, arguments, load)


def describe_causes(error: BaseException) -> str:
    """Format an error with its causes, the first cause last.

    A loader's own message often hides what was missing.
    """
    found: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        found.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return ", because of ".join(dict.fromkeys(found))


def _import_package(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        # The package is there, and something that it imports is not: to install it would help
        # nobody.
        if error.name != name:
            raise ConfigError(
                f"the package verifiers cannot be imported: {describe_causes(error)}"
            ) from error
        raise ConfigError(
            "a verifiers environment needs verifiers; run `pip install 'verifiers>=0.1.9,<0.5'` in "
            "this interpreter, or name one that has it: VerifiersConfig(python=...)"
        ) from error


def _find_v1(verifiers: ModuleType) -> Any:
    """Return the module of v1 environments, in versions that have it in a supported form."""
    try:
        v1 = import_module("verifiers.v1")
    except ModuleNotFoundError as error:
        # A v1 that cannot be imported is no older verifiers, which has none.
        if error.name != "verifiers.v1":
            raise ConfigError(
                f"verifiers {verifiers.__version__} cannot be imported completely: {describe_causes(error)}"
            ) from error
        return None
    return v1 if hasattr(v1, "import_taskset") and hasattr(v1, "ModelContext") else None


def _is_taskset(v1: Any, exported: Any) -> bool:
    return isinstance(exported, type) and issubclass(
        exported, (v1.Taskset, *filter(None, [getattr(v1, "Env", None)]))
    )
