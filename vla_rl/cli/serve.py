"""Serve a policy to robots, simulators and benchmarks: `vla-rl serve CHECKPOINT`.

Speaks openpi's websocket protocol: any client of openpi's, such as
`openpi_client.websocket_client_policy.WebsocketClientPolicy("127.0.0.1", 8000)`, gets action chunks.
CHECKPOINT is the folder of a policy or of a run; of a run the newest checkpoint is served, and each
newer one as soon as it is there, between two replies.

    vla-rl serve runs/srpo-libero-1                         the newest checkpoint of a run
    vla-rl serve FOLDER --map libero                        entries as openpi's LIBERO example names them
    vla-rl serve FOLDER --map observation/front=image       entries of your own client
    vla-rl serve FOLDER --server.host 0.0.0.0 --server.token-file T --server.tls-certificate C --server.tls-key K

http://HOST:PORT/healthz shows the policy and its weights, /metrics the latencies of each client.
SIGTERM or Ctrl-C answers what clients have sent, prints the latencies, and ends.
"""

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from vla_rl.cli.command_line import Command, Launch
from vla_rl.cli.launch import run_recipe
from vla_rl.errors import ConfigError
from vla_rl.evaluation.scenes import resolve_checkpoint
from vla_rl.models.loading import SHIPPED, CheckpointConfig, load_policy
from vla_rl.run.terminal import StopSignal
from vla_rl.serving.latencies import latency_table
from vla_rl.serving.observation_maps import ObservationReader, find_entries, read_map
from vla_rl.serving.policy_server import PolicyServer, ServerConfig
from vla_rl.serving.token_files import read_token
from vla_rl.types import NonNegativeFloat, PositiveFloat, PositiveInt, Sampling
from vla_rl.util.values import plain_console

if TYPE_CHECKING:
    from vla_rl.serving.checkpoint_watcher import Found


class ServeConfig(CheckpointConfig, frozen=True, kw_only=True):
    """The policy, how it chooses actions, and where it is served."""

    checkpoint: tyro.conf.Positional[str] = SHIPPED
    """Folder of a policy, of a checkpoint or of a run. shipped: the base policy of this package that
    was trained on the assets in use."""

    server: ServerConfig = ServerConfig()

    map: tuple[str, ...] = ("libero",)
    """Names of the client's entries: libero, droid, aloha, or pairs such as observation/image=image
    (the client's name, then the policy's). The policy's own names are always understood."""

    temperature: PositiveFloat | None = None
    """Sample actions at this temperature. None: take the most likely action."""

    seed: int = 0
    """Seed of sampled actions."""

    max_batch: PositiveInt = 16
    """Most observations in a batch, whichever connections they come from."""

    torch_threads: PositiveInt | None = None
    """Threads for the policy on a CPU. None: torch's own choice."""

    reload_every_s: NonNegativeFloat = 5.0
    """Seconds between looks for newer weights; 0: never."""

    def __post_init__(self) -> None:
        read_map(self.map)

    @property
    def folder(self) -> Path:
        """Folder that `checkpoint` names."""
        return Path(resolve_checkpoint(self.checkpoint, None)).expanduser()


def load_served(config: ServeConfig, folder: Path) -> Any:
    """Load the policy in a folder as the options say. Raises: ConfigError; CheckpointError."""
    return load_policy(str(folder), config, config.device)


async def serve_policy(command: Command[Launch, ServeConfig]) -> int:
    """Serve until a signal asks to stop; return the exit status."""
    # torch takes 2 s to import
    from vla_rl.models.example_inputs import example_observation
    from vla_rl.serving.checkpoint_watcher import find_policy

    config = command.config
    found = find_policy(config.folder)
    model = await asyncio.to_thread(load_served, config, found.folder)
    example = example_observation(model)
    if example is None:
        raise ConfigError(
            f"{config.checkpoint} is a {type(model).__name__}, which `vla-rl serve` cannot describe "
            "to clients; serve it from Python with vla_rl.serving.PolicyServer"
        )
    reader = ObservationReader(find_entries(example), read_map(config.map))
    print(f"{found.folder}: {model.describe()}", flush=True)
    for name, entry in reader.describe().items():
        print(f"  {name}: {entry}", flush=True)
    if command.launch.dry_run:
        read_token(config.server.token_file)
        config.server.tls_context()
        return 0
    return await _serve(config, model, found, reader)


async def _serve(config: ServeConfig, model: Any, found: "Found", reader: ObservationReader) -> int:
    from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
    from vla_rl.serving.checkpoint_watcher import CheckpointWatcher

    greedy = config.temperature is None
    sampling = Sampling(
        greedy=greedy,
        temperature=1.0 if config.temperature is None else config.temperature,
        seed=config.seed,
    )
    engine_config = EngineConfig(max_batch=config.max_batch)
    with StopSignal("answering what clients have sent") as stop:
        async with (
            DeviceLane(config.torch_threads) as lane,
            TorchActionEngine(model, lane, engine_config, found.version) as engine,
        ):
            watcher = CheckpointWatcher(
                config.folder,
                partial(load_served, config),
                model,
                engine,
                lane,
                found,
            )

            def describe() -> dict[str, Any]:
                state = watcher.state
                return {
                    "server": "vla_rl",
                    "policy": model.describe(),
                    "checkpoint": str(state.served.folder),
                    "weight_version": engine.weight_version,
                    "reload_error": state.error,
                    "observation": reader.describe(),
                }

            async with PolicyServer(
                engine,
                reader,
                config.server,
                sampling,
                describe,
                lambda seen: model.prepare([seen]),
            ) as server:
                print(f"serving at {server.address}; Ctrl-C stops", flush=True)
                await stop.unless_asked(watcher.watch(config.reload_every_s))
            plain_console().print(latency_table(server.clients))
    return 0


main = partial(run_recipe, Launch, ServeConfig, serve_policy, __doc__ or "")

if __name__ == "__main__":
    sys.exit(main())
