"""Policies that somebody else serves, as the policy of an episode.

    RemotePolicyServer ──run_agent──► one connection for each episode ──act──► ActionChunk
                                        OpenpiConnection    openpi's websocket protocol
                                        VlaEvalConnection   that of the package vla-eval (predict servers)

An answer that is late, no chunk, of another width or not finite counts like a server that died: the
episode is lost and run again, and the error names the server. Read in openpi-client 0.1.2 and
vla-eval 0.8.0.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import msgspec
import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from vla_rl.errors import ActorDied, ConfigError
from vla_rl.rollout.agents import embodied_agent
from vla_rl.serving.latencies import ClientLatencies
from vla_rl.serving.observation_maps import read_map
from vla_rl.serving.openpi_messages import (
    BadMessage,
    decode_message,
    encode_message,
    restore_array,
)
from vla_rl.serving.remote_config import RemotePolicyConfig
from vla_rl.types import (
    ActionChunk,
    Env,
    Observation,
    Policy,
    Sampling,
    Trajectory,
)
from vla_rl.util.listening import read_token

VLA_EVAL_VERSION: Final = 1
"""Protocol version of vla-eval that is spoken here (`PROTOCOL_VERSION` of vla-eval 0.8)."""

MOST_BYTES: Final = 64_000_000
"""Largest answer; a chunk has some hundred bytes."""

CHANGES: Final = ("weight_version", "reload_error", "server_timing")
"""Entries of a server's metadata that may change while it serves the same policy."""


class PolicyServerLost(ActorDied):
    """A policy server cannot be reached, is late, or answers what no policy answers."""

    def __init__(self, address: str, cause: str) -> None:
        super().__init__(address, 0, cause)
        self.args = (f"policy server {address}: {cause}",)


class RemoteConnection(ABC):
    """One episode's connection to a policy server.

    Args:
        connection: a connection that was just opened.
        config: names and limits.
    """

    def __init__(self, connection: ClientConnection, config: RemotePolicyConfig) -> None:
        self._connection, self._config = connection, config

    @abstractmethod
    async def greet(self) -> dict[str, Any]:
        """Open the conversation; return what the server says about itself. Raises: BadMessage."""

    @abstractmethod
    async def begin_episode(self, task: str) -> None:
        """Tell the server that an episode begins, if its protocol has a word for it."""

    @abstractmethod
    async def ask(self, observation: Observation) -> dict[str, Any]:
        """Return the answer to an observation, a map with "actions". Raises: BadMessage."""

    async def _receive(self) -> bytes | str:
        async with asyncio.timeout(self._config.answer_timeout_s):
            return await self._connection.recv()


class OpenpiConnection(RemoteConnection):
    """openpi's protocol: metadata first, then an answer to each observation."""

    async def greet(self) -> dict[str, Any]:
        """Return the metadata."""
        return _read_map(await self._receive())

    async def begin_episode(self, task: str) -> None:
        """Do nothing: the protocol has no episodes."""

    async def ask(self, observation: Observation) -> dict[str, Any]:
        """Send what the map names, and return the answer."""
        pairs = read_map(self._config.map)
        # A published map names what some scenes lack, such as a wrist camera; a pair is what the user wants sent.
        wanted = [key for _, key in read_map(each for each in self._config.map if "=" in each)]
        if missing := [key for key in wanted if key not in observation]:
            raise ConfigError(
                f"server.map names {', '.join(map(repr, missing))}, which the environment does not show; it shows "
                f"{', '.join(map(repr, sorted(observation)))}"
            )
        message = {name: observation[key] for name, key in pairs if key in observation}
        await self._connection.send(encode_message(message))
        return _read_map(await self._receive())


def _read_map(frame: bytes | str) -> dict[str, Any]:
    # openpi's server sends its traceback as text and closes
    if isinstance(frame, str):
        raise BadMessage(f"it answers with an error: {frame.strip()[-2000:]}")
    return decode_message(frame)


class VlaEvalMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of vla-eval.

    Example:
        VlaEvalMessage(type="observation", payload={"task_description": "open it"}, seq=4, timestamp=1.5)
    """

    type: str
    payload: dict[str, Any]
    seq: int
    timestamp: float


class VlaEvalConnection(RemoteConnection):
    """vla-eval's protocol: hello, the start of an episode, one action or chunk for each observation."""

    _seq = 0

    async def greet(self) -> dict[str, Any]:
        """Exchange hellos. Raises: BadMessage for another version of the protocol."""
        hello = await self._exchange(
            "hello", {"harness_version": "vla_rl", "protocol_version": VLA_EVAL_VERSION}, "hello"
        )
        version = hello.get("protocol_version")
        if version != VLA_EVAL_VERSION:
            raise BadMessage(
                f"it speaks version {version!r} of vla-eval's protocol, expected {VLA_EVAL_VERSION}"
            )
        return hello

    async def begin_episode(self, task: str) -> None:
        """Send the start of the episode, which predict servers reset their chunks at."""
        await self._send("episode_start", {"task": {"name": task}})

    async def ask(self, observation: Observation) -> dict[str, Any]:
        """Send the observation as vla-eval's LIBERO benchmark does, and return the action."""
        images = {"agentview": observation["image"]}
        if "wrist_image" in observation:
            images["wrist"] = observation["wrist_image"]
        payload = {"images": images, "task_description": observation["instruction"]}
        if "state" in observation:
            payload["states"] = observation["state"]
        return await self._exchange("observation", payload, "action")

    async def _exchange(
        self, kind: str, payload: Mapping[str, Any], expected: str
    ) -> dict[str, Any]:
        await self._send(kind, payload)
        frame = await self._receive()
        try:
            data = frame.encode() if isinstance(frame, str) else frame
            answer = msgspec.msgpack.decode(data, type=VlaEvalMessage)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadMessage(f"its answer is no message of vla-eval: {error}") from error
        if answer.type != expected or answer.seq != self._seq:
            raise BadMessage(
                f"it answers {answer.type!r} {answer.seq} ({str(answer.payload)[:2000]}) to message "
                f"{self._seq}, expected {expected!r}"
            )
        return {name: _restore_plain_keys(name, value) for name, value in answer.payload.items()}

    async def _send(self, kind: str, payload: Mapping[str, Any]) -> None:
        self._seq += 1
        message = {"type": kind, "payload": payload, "seq": self._seq, "timestamp": time.time()}
        await self._connection.send(msgspec.msgpack.encode(message, enc_hook=_encode_plain_keys))


def _encode_plain_keys(value: Any) -> Any:
    array = np.ascontiguousarray(value)
    return {
        "__ndarray__": True,
        "data": array.data,
        "dtype": array.dtype.str,
        "shape": list(np.shape(value)),
    }


def _restore_plain_keys(name: str, value: Any) -> Any:
    if isinstance(value, dict) and "__ndarray__" in value:
        where = f"entry {name!r}"
        return restore_array(value.get("data"), value.get("dtype"), value.get("shape"), where)
    return value


class _RemoteEpisodePolicy:
    """The policy of one episode: asks the server, checks the answer, measures how long it took."""

    def __init__(self, server: "RemotePolicyServer", connection: RemoteConnection) -> None:
        self._server, self._connection = server, connection

    async def act(self, observation: Observation, sampling: Sampling | None = None) -> ActionChunk:
        """Return the rows of the server's chunk that are run."""
        server, started_at = self._server, time.monotonic()
        with server.naming_losses():
            answer = await self._connection.ask(observation)
            actions = server.read_actions(answer)
        server.latencies.add_reply(time.monotonic() - started_at, is_error=False)
        server.note_version(answer.get("weight_version"))
        # a policy elsewhere has neither tokens nor probabilities; its numbers stand for the tokens
        return ActionChunk(
            actions=actions,
            tokens=actions.ravel(),
            log_probs=np.zeros(actions.size, np.float32),
            weight_version=0,
        )


class RemotePolicyServer:
    """A policy server, asked by any number of episodes.

    Args:
        address: its URL, ws://HOST:PORT.
        config: protocol, names and limits.
        action_size: numbers of the environment's action.
    """

    weight_version = 0
    """An evaluation counts no updates of its own."""

    def __init__(self, address: str, config: RemotePolicyConfig, action_size: int) -> None:
        self.address, self._config, self._action_size = address, config, action_size
        self._token = read_token(config.token_file)
        self._version: Any = None
        self.latencies = ClientLatencies(client=address)
        """Times of its answers, the network's included."""

    async def read_metadata(self) -> dict[str, Any]:
        """Return what the server says about itself, without what may change.

        Raises: ConfigError if it cannot be reached, or speaks another protocol.
        """
        try:
            async with self._connected() as (_, said):
                return {name: value for name, value in said.items() if name not in CHANGES}
        except PolicyServerLost as error:
            raise ConfigError(str(error)) from error

    async def act(self, observation: Observation, sampling: Sampling) -> ActionChunk:
        """Answer one observation on a connection of its own. Raises: PolicyServerLost."""
        async with self._connected() as (connection, _):
            with self.naming_losses():
                await connection.begin_episode(observation.get("instruction", ""))
            return await _RemoteEpisodePolicy(self, connection).act(observation, sampling)

    async def run_agent(self, env: Env, policy: Policy) -> Trajectory:
        """Run one episode with this server; `policy` is not asked. Raises: PolicyServerLost."""
        async with self._connected() as (connection, _):
            with self.naming_losses():
                await connection.begin_episode(env.episode.task)
            return await embodied_agent(env, _RemoteEpisodePolicy(self, connection))

    def read_actions(self, answer: Mapping[str, Any]) -> np.ndarray:
        """Return the rows of an answer that are run, float32 [N, D] in [-1, 1].

        Raises: BadMessage.
        """
        actions = answer.get("actions")
        if not isinstance(actions, np.ndarray):
            raise BadMessage(
                f"its answer has the entries {', '.join(map(repr, answer))}, expected an array 'actions'"
            )
        rows = np.atleast_2d(actions)
        if rows.ndim != 2 or rows.shape[1] != self._action_size or len(rows) == 0:
            raise BadMessage(
                f"its actions are {list(actions.shape)}, expected [H, {self._action_size}]"
            )
        if not np.isfinite(rows).all():
            raise BadMessage("its actions hold NaN or infinity")
        # as within_range does for policies of this process: LIBERO's controller clips too
        return np.clip(rows[: self._config.replan], -1.0, 1.0).astype(np.float32)

    def note_version(self, version: Any) -> None:
        """Compare the weights that answered with those before. Raises: ConfigError."""
        if self._version is None:
            self._version = version
        if version != self._version:
            raise ConfigError(
                f"policy server {self.address} changed its weights from version {self._version} to "
                f"{version} during the evaluation, and one table cannot hold both; serve one checkpoint"
            )

    @contextmanager
    def naming_losses(self) -> Iterator[None]:
        """Raise what goes wrong with the server in the block as a PolicyServerLost that names it."""
        try:
            yield
        except TimeoutError as error:
            cause = f"no answer within {self._config.answer_timeout_s:g} s"
            raise PolicyServerLost(self.address, cause) from error
        except ConnectionClosed as error:
            raise PolicyServerLost(self.address, f"the connection ended: {error}") from error
        except BadMessage as error:
            raise PolicyServerLost(self.address, str(error)) from error

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[tuple[RemoteConnection, dict[str, Any]]]:
        """Yield a connection, and what the server said about itself. Raises: PolicyServerLost."""
        kind = OpenpiConnection if self._config.protocol == "openpi" else VlaEvalConnection
        async with await self._connect() as socket:
            connection = kind(socket, self._config)
            with self.naming_losses():
                said = await connection.greet()
            # not in the block above: an environment's own errors are none of the server's
            yield connection, said

    async def _connect(self) -> ClientConnection:
        headers = {} if self._token is None else {"Authorization": f"Api-Key {self._token}"}
        give_up_at = time.monotonic() + self._config.connect_timeout_s
        while True:
            try:
                return await connect(
                    self.address,
                    compression=None,
                    max_size=MOST_BYTES,
                    additional_headers=headers,
                    # a server that computes in its only thread answers no pings
                    ping_interval=None,
                )
            except InvalidURI as error:
                raise ConfigError(f"{self.address} is no address of a policy server") from error
            except InvalidHandshake as error:
                raise PolicyServerLost(
                    self.address, f"it refuses the connection: {error}"
                ) from error
            except OSError as error:
                if time.monotonic() > give_up_at:
                    raise PolicyServerLost(self.address, f"cannot be reached: {error}") from error
            # it may be starting again
            await asyncio.sleep(0.5)
