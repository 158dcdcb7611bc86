"""The servers of an engine: which of them take requests, with which weights.

    answer ─► the least loaded server that is ready; none during an update
    publish ─► running requests end ─► every server loads the weights ─► probe

Each version of the weights is a checkpoint folder that loads by itself. Invariant: a server takes requests
only while its weights are those of `weight_version`, which its log-probs of a few tokens have shown:
servers that load nothing, half or other weights say nothing.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import aiohttp
import msgspec
import numpy as np
import torch
from torch import nn

from vla_rl.engines.config import ModelServerConfig
from vla_rl.engines.engine_pool import EnginePool
from vla_rl.engines.server.servers import ModelServer, ServerLost, SglangServer, VllmServer
from vla_rl.engines.vllm.launch import write_folder
from vla_rl.engines.vllm.served import Answer, ReplyRules, ServedLanguage
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.types import Sampling
from vla_rl.util.atomic_files import writing_folder
from vla_rl.util.ownership import OwnedFolder, remove_abandoned_folders
from vla_rl.util.tasks import gather_all, leave_group

PROBE: Final = Sampling(temperature=0.7)
"""Sampling of the requests that compare a server with the learner; at 1 a server that ignores the
temperature would look right."""

NUM_PROBES: Final = 4

_PREFIX: Final = "vla_rl-weights-"

MAX_PROBE_GAP: Final = 0.2
"""Largest difference of log-probs that passes: bfloat16 stays below 0.1, other weights do not."""


class ServerWeights(NamedTuple):
    """One version of the weights, for servers.

    Example:
        ServerWeights(folder=Path("/shared/weights/vla_rl-weights-x1/version-7-8"), probe=log_probs)
    """

    folder: Path
    """A checkpoint that loads by itself."""

    probe: np.ndarray
    """float32 [V]: the log-probs of the probe prompt's next token, at `PROBE`'s temperature."""

    def gap(self, answers: list[Answer]) -> float:
        """Return the largest difference of the answers' first log-probs from these weights'."""
        return max(abs(float(self.probe[each.tokens[0]] - each.log_probs[0])) for each in answers)


class WeightFolders:
    """Writes versions of a policy's weights into a folder of its own, which it removes in the end.

    Args:
        served: the language policy.
        parent: folder that all servers reach under this path; None for a temporary one.
    """

    def __init__(self, served: ServedLanguage, parent: str | None) -> None:
        self._served, self._parent = served, parent
        self._num_written = 0
        self.probe_prompt = served.sample_request().token_ids

    def __enter__(self) -> Self:
        """Make the folder. Raises: ConfigError if it cannot be written."""
        try:
            if self._parent is not None:
                Path(self._parent).mkdir(parents=True, exist_ok=True)
            if self._parent is None:
                # Only in the temporary folder: a folder that was named may be shared with other
                # machines, whose locks are not seen from here.
                remove_abandoned_folders(_PREFIX)
            self._owned = OwnedFolder(_PREFIX, self._parent)
        except OSError as error:
            raise ConfigError(f"engine.server.weights_folder cannot be written: {error}") from error
        self._folder = self._owned.path.absolute()
        self._folder.chmod(0o755)  # servers may belong to another user
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove the folder."""
        self._owned.remove_folder()

    def write_version(self, network: nn.Module, version: int) -> ServerWeights:
        """Write one version, on the device lane. Raises: CheckpointError."""
        # The same tokens that each server is asked to continue once it has loaded: a server that
        # kept the old weights, or half of the new ones, answers with other log-probs.
        prompt = torch.tensor([self.probe_prompt])
        with torch.inference_mode():
            logits = network(prompt.to(next(network.parameters()).device)).logits[0, -1].float()
            probe = torch.log_softmax(logits / PROBE.temperature, -1).cpu().numpy()
        tensors = {
            name: tensor.detach().cpu() for name, tensor in self._served.tensors(network).items()
        }
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._num_written += 1
        target = self._folder / f"version-{version}-{self._num_written}"
        with writing_folder(target, num_bytes) as writer:
            write_folder(writer.new_path("config.json").parent, self._served.layout)
            writer.write_tensors("model.safetensors", tensors)
        return ServerWeights(target, probe)


logger = logging.getLogger(__name__)

_KINDS: Final[dict[str, type[ModelServer]]] = {"vllm": VllmServer, "sglang": SglangServer}


class ServerPool(EnginePool[ModelServer]):
    """Servers that hold one policy's weights. Owned by `async with`, in the event loop. See `EnginePool`.

    Args:
        config: their addresses and limits.
        probe_prompt: tokens whose next one shows a server's weights.
        weight_version: number of the version that every server loads first.

    Attributes:
        current: that version; set before it is opened.
        weight_version: number of updates applied to the weights that reply from now on.
        num_updates: number of updates so far.
        pause_s: seconds for which requests waited during the last update.
    """

    def __init__(
        self,
        config: ModelServerConfig,
        probe_prompt: Sequence[int],
        weight_version: int,
    ) -> None:
        super().__init__(config.attempts, wait_limit_s=config.request_timeout_s)
        self._config, self._probe_prompt = config, probe_prompt
        self.current: ServerWeights | None = None
        self.weight_version = weight_version
        self._servers: list[ModelServer] = []
        self._turn = asyncio.Lock()
        self.num_updates, self.pause_s = 0, 0.0

    async def __aenter__(self) -> Self:
        """Give the weights to all servers.

        Raises: ConfigError with the reason if one of them does not take them.
        """
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(
                aiohttp.ClientSession(
                    headers=_headers(self._config.key_variable),
                    connector=aiohttp.TCPConnector(limit=0),
                )
            )
            kind = _KINDS[self._config.api]
            self._servers = [kind(url, self._config, session) for url in self._config.urls]
            try:
                # All of them before the first loads anything: a wrong address is an error of the
                # start, and not a server that is lost later.
                await gather_all(server.check_interface() for server in self._servers)
                await gather_all(self._join(server) for server in self._servers)
            except ServerLost as error:
                raise ConfigError(
                    f"{error}; start it before the run, or correct engine.server.urls"
                ) from None
            self._tasks = asyncio.TaskGroup()
            await self._tasks.__aenter__()
            self._checking = self._tasks.create_task(self._check_servers(), name="model servers")
            self.is_open = True
            self._resources = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the servers running; callers that still wait get a RuntimeError."""
        self.is_open = False
        self._checking.cancel()
        try:
            await leave_group(self._tasks, kind, error, traceback)
        finally:
            async with self._turn:  # a started update has to finish first
                for server in self._servers:
                    server.is_ready = False
                await self._resources.aclose()
            self.wake_callers()

    def list_engines(self) -> list[ModelServer]:
        """Return the servers."""
        return self._servers

    def find_failure(self, *, has_waited: bool) -> ServerLost | None:
        """Return the last loss if none became ready in time: until then a lost server may come back."""
        if not has_waited:
            return None
        losses = [server.loss for server in self._servers if server.loss is not None]
        return (losses or [ServerLost("(any)", "none became ready")])[-1]

    # who waits          for                    woken by
    # `_until_idle`      running requests       each answer or loss; after `update_timeout_s` the server is lost
    # `_check_servers`   its next round         the loop's clock, every `health_every_s`
    # `_check_server`    `_turn`                the end of an update: a server that answers again loads its weights

    async def publish(self, weights: ServerWeights, version: int) -> None:
        """Give new weights to the servers; one that does not take them is lost.

        Raises: CheckpointError if none took them.
        """
        async with self._turn:
            before, self.current = self.current, weights
            self.is_paused = True
            paused_at = time.perf_counter()
            try:
                servers = self.ready()
                if self._config.update_mode == "interrupt":
                    await self._each(servers, lambda server: server.pause_requests())
                # A reply during which the weights change would hold tokens of both versions, and
                # the answer does not say which.
                await self._until_idle(servers)
                self.weight_version = version
                await self._each(servers, self._load)
            finally:
                self.num_updates += 1
                self.is_paused = False
                self.wake_callers()
                self.pause_s = time.perf_counter() - paused_at
        assert before is not None
        await asyncio.to_thread(shutil.rmtree, before.folder, True)  # no server loads it any more
        if not self.ready():
            raise CheckpointError(
                f"no model server took the weights of version {version}: "
                + "; ".join(str(server.loss) for server in self._servers)
            )

    async def _each(
        self, servers: Sequence[ModelServer], act: Callable[[ModelServer], Awaitable[None]]
    ) -> None:
        """Act on the servers that are ready, side by side; one that fails is lost."""

        async def one(server: ModelServer) -> None:
            try:
                await act(server)
            except ServerLost:
                pass  # noted, and logged
            except (ConfigError, ValueError) as error:
                server.mark_lost(str(error))

        await asyncio.gather(*(one(server) for server in servers if server.is_ready))

    async def _until_idle(self, servers: Sequence[ModelServer]) -> None:
        """Wait until the servers have answered; one that does not in time is lost."""
        limit_s = self._config.update_timeout_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while any(server.num_running for server in servers if server.is_ready):
                    self._changed.clear()
                    await self._changed.wait()
        for server in servers:
            if server.is_ready and server.num_running:
                server.mark_lost(
                    f"{server.num_running} requests did not end within update_timeout_s = "
                    f"{limit_s:g} s"
                )

    async def _load(self, server: ModelServer) -> None:
        """Have a server load the current weights, and see in its log-probs that it has.

        Raises: ServerLost; ConfigError.
        """
        assert self.current is not None
        await server.load_weights(self.current.folder, self.weight_version)
        if self._config.update_mode == "interrupt":
            await server.resume_requests()
        # Several, because one token alone may be as likely under other weights.
        seeds = [msgspec.structs.replace(PROBE, seed=seed) for seed in range(NUM_PROBES)]
        answers = await asyncio.gather(
            *(server.sample_reply(self._probe_prompt, each, 1, ReplyRules()) for each in seeds)
        )
        gap = self.current.gap(answers)
        if not gap <= MAX_PROBE_GAP:
            raise ConfigError(
                f"{server.url} loaded weights {self.weight_version}, but its log-probs differ from "
                f"the learner's by {gap:.2f}, expected at most {MAX_PROBE_GAP}. Start a vLLM server "
                "with --logprobs-mode processed_logprobs; a CPU build of vLLM does not load new "
                "weights into an output head that is tied to the embedding"
            )

    async def _join(self, server: ModelServer) -> None:
        """Give a server that was just opened the current weights, then requests."""
        await self._load(server)
        server.is_ready = True
        self.wake_callers()

    async def _check_servers(self) -> None:
        while True:
            await asyncio.sleep(self._config.health_every_s)
            await asyncio.gather(*(self._check_server(server) for server in self._servers))

    async def _check_server(self, server: ModelServer) -> None:
        try:
            if server.is_ready:
                await server.check_health()
                return
            # The whole interface and not its health alone: what answers at this address may be
            # another server by now.
            await server.check_interface()
            async with self._turn:
                await self._join(server)
            logger.warning("%s answers again, with weights %d", server.url, self.weight_version)
        except ServerLost:
            pass  # noted, and logged when it was lost
        except (ConfigError, ValueError) as error:
            server.mark_lost(str(error))


def _headers(key_variable: str | None) -> dict[str, str]:
    if key_variable is None:
        return {}
    key = os.environ.get(key_variable)
    if not key:
        raise ConfigError(
            f"the environment variable {key_variable} (engine.server.key_variable) is not set; "
            "expected the servers' API key"
        )
    return {"Authorization": f"Bearer {key}"}
