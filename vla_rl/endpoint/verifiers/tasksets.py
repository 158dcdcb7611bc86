"""v1 environments of the package verifiers, 0.2 to 0.4.

They are tasksets that run against an OpenAI-compatible URL.

verifiers is imported only inside the methods: it is large, and often in another interpreter.
"""

import asyncio
import hashlib
import itertools
import os
from typing import Any

from vla_rl.endpoint.verifiers.played import Played, numbers
from vla_rl.errors import EnvError


class EpisodesOf02:
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

    async def open(self) -> None:
        """Build the environment and start to serve its tools."""
        self._env = self._build()
        self._tasks = self._select()
        is_ready = asyncio.Event()
        self._serving = asyncio.create_task(
            self._serve(is_ready), name="tools of a verifiers environment"
        )
        ready = asyncio.create_task(is_ready.wait(), name="start of a verifiers environment")
        await asyncio.wait({self._serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._serving.done():
            self._serving.result()

    @property
    def num_rows(self) -> int:
        """Number of tasks of the taskset."""
        return len(self._tasks)

    async def play(self, row: int, base_url: str, api_key: str) -> Played:
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
        return _outcome([trace], [])

    async def close(self) -> None:
        """Stop serving."""
        self._is_over.set()
        if self._serving is not None:
            await self._serving

    def _build(self) -> Any:
        import verifiers.v1 as vf

        return vf.Environment(vf.EnvConfig.model_validate(_with_id(self._arguments, self._env_id)))

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


class EpisodesOf03(EpisodesOf02):
    """A v1 environment of verifiers 0.3 and 0.4: a taskset and its agents."""

    async def play(self, row: int, base_url: str, api_key: str) -> Played:
        """Run one episode, in which each of several roles requests the model of its name."""
        import verifiers.v1 as vf

        client = vf.EvalClientConfig(base_url=base_url, api_key_var=_key_variable(api_key))
        episode = await self._env.run_episode(
            self._tasks[row], vf.ModelContext(model="policy", client=client)
        )
        return _outcome(list(episode.traces), list(episode.errors))

    def _build(self) -> Any:
        import verifiers.v1 as vf

        fields = _with_id(self._arguments, self._env_id)
        config = vf.resolve_env_config(fields)
        agents = {name: agent for name, agent in config if isinstance(agent, vf.AgentConfig)}
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


def _with_id(arguments: dict[str, Any], env_id: str) -> dict[str, Any]:
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


def _outcome(traces: list[Any], errors: list[Any]) -> Played:
    """Return the outcome of an episode. Raises: EnvError for one with an error."""
    errors = [*errors, *(error for trace in traces for error in trace.errors)]
    if errors:
        raise EnvError(
            "the environment failed: "
            + "; ".join(f"{each.type}: {each.message}" for each in errors)[:2000]
        )
    taught = [
        trace for trace in traces if getattr(getattr(trace, "agent", None), "trainable", True)
    ] or traces
    earned: dict[str, list[float]] = {}
    for trace in taught:
        earned.setdefault(getattr(getattr(trace, "agent", None), "name", None) or "", []).append(
            float(trace.reward)
        )
    return Played(
        reward=sum(float(trace.reward) for trace in taught) / len(taught),
        rewards={name: sum(rewards) / len(rewards) for name, rewards in earned.items() if name},
        is_truncated=any(trace.is_truncated for trace in taught),
        stop_condition=taught[-1].stop_condition or "",
        metrics={
            name: number for trace in taught for name, number in numbers(trace.metrics).items()
        },
    )
