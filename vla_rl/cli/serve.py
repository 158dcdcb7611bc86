"""Serve a policy to robots, simulators and benchmarks: `vla-rl serve CHECKPOINT`.

Speaks openpi's websocket protocol, or OpenAI's API for a language model. By default, any client of openpi's, such as
`openpi_client.websocket_client_policy.WebsocketClientPolicy("127.0.0.1", 8000)`, gets action chunks.
CHECKPOINT is the folder of a policy or of a run; of a run the newest checkpoint is served, and each
newer one as soon as it is there, between two replies.

    vla-rl serve runs/srpo-libero-1                         the newest checkpoint of a run
    vla-rl serve FOLDER --map libero                        entries as openpi's LIBERO example names them
    vla-rl serve FOLDER --map observation/front=image       entries of your own client
    vla-rl serve smollm2 --protocol openai                  a language model, to any client of OpenAI's API
    vla-rl serve FOLDER --server.host 0.0.0.0 --server.token-file T --server.tls-certificate C --server.tls-key K

http://HOST:PORT/healthz shows the policy and its weights, /metrics the latencies of each client.
SIGTERM or Ctrl-C answers what clients have sent, prints the latencies, and ends.
"""

import asyncio
import itertools
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import tyro

from vla_rl.cli.command_line import Command, Launch
from vla_rl.cli.launch import run_recipe
from vla_rl.errors import ConfigError
from vla_rl.evaluation.scenes import resolve_checkpoint
from vla_rl.models.loading import DecodingConfig
from vla_rl.models.shipped import SHIPPED
from vla_rl.rollout.engines import ChatEngine
from vla_rl.run.terminal import StopSignal
from vla_rl.serving.latencies import latency_table
from vla_rl.serving.observation_maps import (
    ObservationReader,
    find_entries,
    list_plan_entries,
    read_map,
)
from vla_rl.serving.policy_server import PolicyServer, ServerConfig
from vla_rl.types import (
    ANY_REPLY,
    Completion,
    NonNegativeFloat,
    PositiveInt,
    Prompt,
    ReplyOptions,
    Sampling,
    ToolSpec,
    derive_seed,
)
from vla_rl.util.listening import is_local_address, read_token, tls_context
from vla_rl.util.values import plain_console

if TYPE_CHECKING:
    from vla_rl.serving.checkpoint_watcher import Found


LOCAL_KEY: Final = "local"
"""Key of OpenAI's clients, which need one, where the server asks for no token."""


class ServeConfig(DecodingConfig, frozen=True, kw_only=True):
    """The policy, how it chooses actions, and where it is served."""

    checkpoint: tyro.conf.Positional[str] = SHIPPED
    """Folder of a policy, of a checkpoint or of a run. shipped: the base policy of this package that
    was trained on the assets in use; shipped_flow: its flow policy; shipped_goal: its policy for libero_goal."""

    protocol: Literal["openpi", "openai"] = "openpi"
    """openpi: action chunks over a websocket. openai: chat, completions and responses of a language
    model, text alone; CHECKPOINT may then be smollm2, a GGUF file or a hub id."""

    server: ServerConfig = ServerConfig()

    map: tuple[str, ...] = ("libero",)
    """Names of the client's entries: libero, droid, aloha, or pairs such as observation/image=image
    (the client's name, then the policy's). The policy's own names are always understood."""

    max_batch: PositiveInt = 16
    """Most observations in a batch, whichever connections they come from."""

    torch_threads: PositiveInt | None = None
    """Threads for the policy on a CPU. None: torch's own choice."""

    reload_every_s: NonNegativeFloat = 5.0
    """Seconds between looks for newer weights; 0: never."""

    def __post_init__(self) -> None:
        read_map(self.map)
        self.require(
            not self.by_mean or self.protocol == "openpi",
            "by_mean",
            "False with the protocol openai: tokens of a language have no means",
        )

    @property
    def folder(self) -> Path:
        """Folder that `checkpoint` names."""
        return Path(os.path.expanduser(resolve_checkpoint(self.checkpoint, None)))


def load_served(config: ServeConfig, folder: Path) -> Any:
    """Load the policy in a folder as the options say. Raises: ConfigError; CheckpointError."""
    if config.protocol == "openai":
        from vla_rl.models.language import load_language_model

        return load_language_model(folder)
    return config.load_decoder(str(folder))


async def serve_policy(command: Command[Launch, ServeConfig]) -> int:
    """Serve until a signal asks to stop; return the exit status."""
    # torch takes 2 s to import
    from vla_rl.models.example_inputs import example_observation

    config = command.config
    if command.launch.dry_run:
        read_token(config.server.token_file)
        tls_context(config.server.tls_certificate, config.server.tls_key)
    found = await asyncio.to_thread(_find_served, config)
    model = await asyncio.to_thread(load_served, config, found.folder)
    if config.protocol == "openai":
        print(f"{found.folder}: {type(model).__name__}, {model.context_size} tokens", flush=True)
        return 0 if command.launch.dry_run else await _serve_replies(config, model, found)
    example = example_observation(model)
    if example is None:
        raise ConfigError(
            f"{config.checkpoint} is a {type(model).__name__}, which `vla-rl serve` cannot describe "
            "to clients; serve it from Python with vla_rl.serving.PolicyServer"
        )
    entries = find_entries(example)
    if getattr(model, "follows_plans", False):
        entries |= list_plan_entries(model.config.action_dim)
    reader = ObservationReader(entries, read_map(config.map))
    print(f"{found.folder}: {model.describe()}", flush=True)
    for name, entry in reader.describe().items():
        print(f"  {name}: {entry}", flush=True)
    # A pair may name a camera that this policy does not look at, so that a client may send it.
    for source, target in reader.list_unused():
        if f"{source}={target}" in config.map:
            print(
                f"  {source} is left out: the policy reads no {target!r} (--map {source}={target})",
                flush=True,
            )
    return 0 if command.launch.dry_run else await _serve_actions(config, model, found, reader)


def _find_served(config: ServeConfig) -> "Found":
    """Return the folder that CHECKPOINT names; a language model may have a name instead."""
    from vla_rl.serving.checkpoint_watcher import find_policy

    if config.protocol == "openai" and not config.folder.is_dir():
        from vla_rl.models.language.checkpoint import local_folder

        return find_policy(local_folder(config.checkpoint))
    return find_policy(config.folder)


async def _serve_actions(
    config: ServeConfig, model: Any, found: "Found", reader: ObservationReader
) -> int:
    from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
    from vla_rl.serving.checkpoint_watcher import CheckpointWatcher

    engine_config = EngineConfig(max_batch=config.max_batch)
    with StopSignal("answering what clients have sent") as stop:
        async with (
            DeviceLane(config.torch_threads) as lane,
            TorchActionEngine(model, lane, engine_config, found.version) as engine,
        ):
            load = partial(load_served, config)
            watcher = CheckpointWatcher(config.folder, load, model, engine, lane, found)

            def describe() -> dict[str, Any]:
                state = watcher.state
                return {
                    "server": "vla_rl",
                    "policy": model.describe(),
                    "checkpoint": str(state.served.folder),
                    "weight_version": engine.weight_version,
                    "reload_error": state.error,
                    "observation": reader.describe(),
                    # a client that evaluates must not add results of one decoding to another's
                    **({"by_mean_at": config.sampling.temperature} if config.by_mean else {}),
                }

            async with PolicyServer(
                engine,
                reader,
                config.server,
                config.sampling,
                describe,
                lambda seen: model.prepare([seen]),
            ) as server:
                print(f"serving at {server.address}; Ctrl-C stops", flush=True)
                await stop.unless_asked(watcher.watch(config.reload_every_s))
            plain_console().print(latency_table(server.clients))
    return 0


async def _serve_replies(config: ServeConfig, model: Any, found: "Found") -> int:
    """Serve a language model by OpenAI's API."""
    from vla_rl.endpoint import Endpoint, EndpointConfig
    from vla_rl.engines import DeviceLane, EngineConfig
    from vla_rl.engines.torch_engine import TorchChatEngine
    from vla_rl.serving.checkpoint_watcher import CheckpointWatcher

    server = config.server
    endpoint_config = EndpointConfig(
        host=server.host,
        port=server.port,
        allow_remote=not is_local_address(server.host),  # ServerConfig asks for a token and TLS
        tls_certificate=server.tls_certificate,
        tls_key=server.tls_key,
        model=Path(config.checkpoint).name,
        max_connections=server.max_connections,
        max_request_kb=server.max_message_mb * 1000,
    )
    key = read_token(server.token_file) or LOCAL_KEY
    with StopSignal("answering what clients have sent") as stop:
        async with (
            DeviceLane(config.torch_threads) as lane,
            TorchChatEngine(
                model, lane, EngineConfig(max_batch=config.max_batch), found.version
            ) as engine,
            Endpoint(endpoint_config) as endpoint,
        ):
            load = partial(load_served, config)
            watcher = CheckpointWatcher(found.checkpoint, load, model, engine, lane, found)
            with endpoint.session(
                ServedReplies(engine, config.sampling), api_key=key, is_recorded=False
            ) as session:
                shown = "the token" if server.token_file else repr(key)
                print(f"serving at {endpoint.base_url}, api_key {shown}; Ctrl-C stops", flush=True)
                await stop.unless_asked(watcher.watch(config.reload_every_s))
                await session.wait_answered(server.drain_timeout_s)
    return 0


class ServedReplies:
    """A language policy whose replies are sampled as the server says, each with its own seed."""

    def __init__(self, engine: ChatEngine, sampling: Sampling) -> None:
        self._engine, self._sampling, self._numbers = engine, sampling, itertools.count()

    async def generate(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[ToolSpec] = (),
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        options: ReplyOptions = ANY_REPLY,
    ) -> Completion:
        """Generate one reply, as `LanguagePolicy.generate` does."""
        seed = derive_seed(self._sampling.seed, next(self._numbers))
        chosen = msgspec.structs.replace(self._sampling, seed=seed)
        return await self._engine.generate(
            prompt, tools=tools, sampling=chosen, max_tokens=max_tokens, options=options
        )


main = partial(run_recipe, Launch, ServeConfig, serve_policy, __doc__ or "")

if __name__ == "__main__":
    sys.exit(main())
