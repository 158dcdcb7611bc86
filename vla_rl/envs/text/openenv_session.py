"""One session of an OpenEnv server: an environment of its own, reached by a WebSocket.

    GET /schema, /metadata      what an action is, and what the environment says of itself
    WS  /ws                     {"type": "reset", "data": {...}} ─► {"type": "observation", "data": {...}}
                                {"type": "step", "data": action} ─► the same, or {"type": "error", ...}

OpenEnv itself is not imported: its server has an interpreter of its own.
"""

import asyncio
from typing import Any, Final, TypeVar

import msgspec

from vla_rl.errors import ActorDied, ConfigError, EnvError, PackageError
from vla_rl.util.values import excerpt

FREE_SESSION_S: Final = 10.0
"""Most seconds to wait for a free session. A server ends a session some time after its connection has
closed, so the next episode may come a moment too early."""

MAX_MESSAGE_BYTES: Final = 64 * 2**20
"""Most bytes of one answer of a server."""


class ServerAnswer(msgspec.Struct, frozen=True):
    """One message of a server.

    Example:
        ServerAnswer(type="observation", data={"observation": {"x": 1}, "reward": 0.5, "done": False})
    """

    type: str
    data: dict[str, Any]


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a reset or a step.

    Example:
        Outcome(observation={"question": "How many legs have 3 cats?"})
    """

    observation: dict[str, Any]
    reward: float | bool | None = None
    done: bool = False


class ServerMetadata(msgspec.Struct, frozen=True):
    """The words of an environment about itself.

    Example:
        ServerMetadata(name="Connect4Environment", description="Connect4Environment environment")
    """

    name: str = ""
    description: str | None = None

    @property
    def own_words(self) -> str:
        """The description; empty for the words that OpenEnv puts there for one that says nothing."""
        return "" if self.description == f"{self.name} environment" else self.description or ""


class FieldError(msgspec.Struct, frozen=True):
    """One field of an action that the server refuses."""

    loc: tuple[str | int, ...] = ()
    msg: str = ""


class Refusal(msgspec.Struct, frozen=True):
    """The data of an answer of type `error`.

    Example:
        Refusal("Invalid message", "VALIDATION_ERROR", errors=(FieldError(("column",), "..."),))
    """

    message: str
    code: str = ""
    errors: tuple[FieldError, ...] = ()
    max_sessions: int | None = None

    @property
    def words(self) -> str:
        """The server's words: what it refused, and each wrong field."""
        details = [f"{'.'.join(map(str, each.loc))}: {each.msg}" for each in self.errors]
        return "; ".join([self.message, *details])


DataT = TypeVar("DataT", Outcome, Refusal)


class ActionRefused(Exception):
    """The server refused an action, with its own words."""


class OpenEnvSession:
    """One session of a server, which is one environment of its own.

    Args:
        url: address of the server, such as http://127.0.0.1:8000.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._http: Any = None
        self._socket: Any = None
        self._turn = asyncio.Lock()
        self._received: asyncio.Queue[Any] = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None
        self.action_schema: dict[str, Any] = {}
        self.description = ""

    async def open(self, options: dict[str, Any]) -> Outcome:
        """Connect, read what the environment is, and reset it.

        Raises: ConfigError if no OpenEnv server answers, or all its sessions are taken; EnvError if
            the environment refuses the reset; PackageError without aiohttp.
        """
        try:
            import aiohttp
        except ModuleNotFoundError as error:
            raise PackageError(
                "text/openenv needs the package aiohttp; run `vla-rl install text`"
            ) from error
        self._http = aiohttp.ClientSession()
        try:
            self.action_schema = (await self._get("schema"))["action"]
            metadata = msgspec.convert(await self._get("metadata"), ServerMetadata)
            self.description = metadata.own_words
            return await self._reset(options)
        except (aiohttp.ClientError, OSError, KeyError, TypeError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"no OpenEnv server answers at {self._url} ({type(error).__name__}: {error}); start "
                "it with its own command, such as `python -m echo_env.server.app`, or name its "
                "address: url"
            ) from error

    async def step(self, action: dict[str, Any]) -> Outcome:
        """Send one action.

        Raises: ActionRefused, with the server's words; ActorDied if the connection has ended.
        """
        answer = await self._exchange({"type": "step", "data": action})
        if answer.type == "error":
            raise ActionRefused(self._read(answer, Refusal).words)
        return self._read(answer, Outcome)

    async def close(self) -> None:
        """Leave the session, which the server then ends."""
        try:
            await self._disconnect()
        finally:
            if self._http is not None:
                await self._http.close()

    async def _reset(self, options: dict[str, Any]) -> Outcome:
        loop = asyncio.get_running_loop()
        until = loop.time() + FREE_SESSION_S
        while True:
            await self._connect()
            answer = await self._exchange({"type": "reset", "data": options})
            if answer.type != "error":
                return self._read(answer, Outcome)
            refusal = self._read(answer, Refusal)
            if refusal.code != "CAPACITY_REACHED":
                raise EnvError(
                    f"the OpenEnv server at {self._url} refused to reset with {excerpt(options)}: "
                    f"{refusal.words}"
                )
            if loop.time() > until:
                raise ConfigError(
                    f"all {refusal.max_sessions} sessions of the OpenEnv server at "
                    f"{self._url} are taken; run at most as many episodes at a time "
                    "(text.num_envs), or start it with more (create_app's max_concurrent_envs)"
                )
            await self._disconnect()
            await asyncio.sleep(0.1)

    async def _connect(self) -> None:
        self._socket = await self._http.ws_connect(
            f"{self._url}/ws", max_msg_size=MAX_MESSAGE_BYTES
        )
        self._received = asyncio.Queue()
        self._reader = asyncio.create_task(
            self._read_messages(self._socket, self._received), name="messages of an OpenEnv server"
        )

    async def _disconnect(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._socket is not None:
            await self._socket.close()

    async def _read_messages(self, socket: Any, received: "asyncio.Queue[Any]") -> None:
        # All the time, and not only when an answer is due: a server closes the connection of a client
        # that answers no ping for 40 s, and a reply may take longer than that.
        while True:
            message = await socket.receive()
            received.put_nowait(message)
            if not isinstance(message.data, str) or socket.closed:
                return

    async def _get(self, path: str) -> dict[str, Any]:
        async with self._http.get(f"{self._url}/{path}", raise_for_status=True) as response:
            return msgspec.json.decode(await response.read(), type=dict[str, Any])

    async def _exchange(self, message: dict[str, Any]) -> ServerAnswer:
        """Send a message and return its answer."""
        # The calls of one reply run at the same time, and an answer names no question.
        async with self._turn:
            if self._socket.closed:
                raise self._lost("the connection has ended")
            try:
                await self._socket.send_str(msgspec.json.encode(message).decode())
                received = await self._received.get()
            except ConnectionError as error:
                raise self._lost(f"the connection has ended: {error}") from error
            except BaseException:
                # The answer of an exchange that was cut off would be read as that of the next one.
                await self._disconnect()
                raise
            if not isinstance(received.data, str):
                raise self._lost(f"the server closed the connection ({received.type.name})")
            try:
                return msgspec.json.decode(received.data, type=ServerAnswer)
            except msgspec.MsgspecError as error:
                raise self._wrong(received.data, error) from error

    def _read(self, answer: ServerAnswer, kind: type[DataT]) -> DataT:
        try:
            return msgspec.convert(answer.data, kind)
        except msgspec.ValidationError as error:
            raise self._wrong(answer.data, error) from error

    def _lost(self, cause: str) -> ActorDied:
        # the scheduler runs the episode again, as it does if a simulator dies
        return ActorDied(f"OpenEnv server {self._url}", 0, cause)

    def _wrong(self, data: object, error: Exception) -> EnvError:
        return EnvError(
            f"the OpenEnv server at {self._url} answered {excerpt(data)}, expected an observation: "
            f"{error}"
        )
