"""Evaluate a policy on Bench2Drive: `python -m vla_rl.recipes.eval_bench2drive --policy base`.

Answers the agents of CARLA's leaderboard (`vla-rl export carla`) with the policy's plans, greedy ones by
default (`--by-mean`: by the means of its tokens), until Ctrl-C. Afterwards, with the leaderboard's results,
prints the benchmark's table:

    ... --results results/*.json --routes bench2drive220.xml --route-set bench2drive220
    ... --first-junctions first_junctions.json --rides rides          # multi-ability, smoothness
"""

import asyncio
import itertools
import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from vla_rl import engines
from vla_rl.cli.command_line import Command, Launch
from vla_rl.cli.launch import run_recipe
from vla_rl.engines import EngineConfig
from vla_rl.envs.bench2drive.policy_host import PolicyHost, find_cameras
from vla_rl.envs.driving.observing import ROUTE_POINTS
from vla_rl.envs.driving.plan_actions import PlanAction
from vla_rl.envs.driving.scores.bench2drive import (
    AbilityTable,
    BenchmarkTable,
    RouteSet,
    make_ability_table,
    make_benchmark_table,
)
from vla_rl.envs.driving.scores.comfort import Smoothness, compute_smoothness
from vla_rl.envs.driving.scores.leaderboard_files import (
    read_first_junctions,
    read_records,
    read_rides,
    read_route_ids,
    read_scenario_types,
    require_route_set,
)
from vla_rl.errors import ConfigError
from vla_rl.models.loading import DecodingConfig
from vla_rl.recipes.driving_training import IMAGE_SIZE, load_driver
from vla_rl.run.terminal import StopSignal
from vla_rl.types import Observation, PositiveFloat, PositiveInt, derive_seed


class EvalBench2DriveConfig(DecodingConfig, frozen=True, kw_only=True):
    """The policy that is served, or the results that the table is made of."""

    policy: str | None = None
    """Folder or hub id of the policy that drives, of any family; or give `results`."""

    results: tuple[str, ...] = ()
    """The leaderboard's results, .json files of --checkpoint, instead of a policy."""

    routes: str | None = None
    """Bench2Drive's file of the routes that were driven, for the table."""

    route_set: RouteSet = "bench2drive220"
    """Route set that the table names. The routes file is checked against it."""

    first_junctions: str | None = None
    """File of the routes' first junctions, which `vla_rl_first_junctions.py` of `vla-rl export carla` writes on the
    machine with CARLA. Adds the multi-ability ratios to the table. None: leave them out."""

    rides: str | None = None
    """Folder of the rides' logs, as the agent's `rides` names it. Adds the smoothness to the table.
    None: leave it out."""

    host: str = "0.0.0.0"
    """Address to listen at."""

    port: int = 5600
    """Port to listen at. 0: a free one."""

    cameras: tuple[str, ...] = ("image",)
    """Keys of the images that the policy reads: image, image_front_left, image_front_right,
    image_back, image_back_left, image_back_right. The agent's configuration names the same
    cameras."""

    image_size: PositiveInt = IMAGE_SIZE
    """Side of the images in pixels, as in the agent's configuration."""

    action: PlanAction = "moves"
    """Meaning of the policy's 8 rows of 3 numbers, as in its training: `moves`, `profiles` or
    `along_route`."""

    route_points: Annotated[int, msgspec.Meta(ge=0, le=ROUTE_POINTS)] = 0
    """Points of the route, every 5 m ahead, that the policy was trained to read."""

    max_batch: PositiveInt = 16
    """Most routes that are answered in one batch."""

    timeout_s: PositiveFloat = 600.0
    """Seconds without a message after which a route is given up."""

    torch_threads: PositiveInt = 1
    """Threads for the policy on a CPU."""

    out: str | None = None
    """File that the table is written to as JSON. None: only printed."""

    def unused_options(self) -> Mapping[str, str]:
        """Return the options of a policy, if there is none."""
        return (
            {} if self.policy else dict.fromkeys(DecodingConfig.__struct_fields__, "policy is none")
        )

    def require_source(self) -> None:
        """Check that there is a policy, or results and their routes. Raises: ConfigError."""
        if (self.policy is None) == (not self.results):
            raise ConfigError(
                f"policy is {self.policy!r} and results are {list(self.results)}, expected one of "
                "the two: give --policy or --results"
            )
        # Bench2Drive has 220 routes, and tables of other sets look alike
        if self.results and self.routes is None:
            raise ConfigError(
                "routes is None, expected Bench2Drive's file of the routes that were driven: "
                "give --routes, because a table must name its route set"
            )
        for option in ("first_junctions", "rides"):
            if getattr(self, option) is not None and not self.results:
                raise ConfigError(
                    f"{option} is {getattr(self, option)!r} without results, expected the "
                    "leaderboard's results that the table is made of: give --results"
                )


async def main(command: Command[Launch, EvalBench2DriveConfig]) -> int:
    """Serve the policy, or print the table; return the exit status."""
    config = command.config
    config.require_source()
    try:
        if config.policy is None:
            graded = await asyncio.to_thread(grade_results, config)
            print(format_table(graded))
            if config.out is not None and not command.launch.dry_run:
                await asyncio.to_thread(Path(config.out).write_bytes, encode_table(graded))
            return 0
        cameras = find_cameras(config.cameras)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    model = await asyncio.to_thread(
        load_driver,
        config.policy,
        config,
        config.device,
        config.action,
        config.route_points,
    )
    config.require_means(model)
    print(model.describe())
    if command.launch.dry_run:
        print("everything that the command would read was found")
        return 0
    # a route takes minutes, and CARLA's side prints on another machine: its lines are the only sign
    logging.getLogger("vla_rl.envs.bench2drive").setLevel(logging.INFO)
    async with (
        engines.DeviceLane(config.torch_threads) as lane,
        engines.TorchActionEngine(model, lane, EngineConfig(max_batch=config.max_batch)) as engine,
    ):
        numbers = itertools.count()

        async def decide(observation: Observation) -> np.ndarray:
            seed = derive_seed(config.seed, next(numbers))
            sampling = msgspec.structs.replace(config.sampling, seed=seed)
            return (await engine.act(observation, sampling)).actions

        address = (config.host, config.port)
        host = PolicyHost(
            decide,
            address,
            cameras,
            config.image_size,
            config.timeout_s,
            config.action,
            config.route_points,
        )
        # serving has no end of its own: a signal is how it is meant to stop
        with StopSignal("losing the routes that are being driven") as stop:
            async with host:
                print(f"serving {config.policy} at {config.host}:{host.port}; stop with Ctrl-C")
                await stop.unless_asked(host.serve())
            print(f"{host.num_routes} routes were driven to their end")
            return stop.exit_status


@dataclass(frozen=True)
class Graded:
    """The benchmark's table, and the parts that need more files; None without them."""

    table: BenchmarkTable
    abilities: AbilityTable | None
    smoothness: Smoothness | None


def grade_results(config: EvalBench2DriveConfig) -> Graded:
    """Grade the results. Raises: ValueError if a file is damaged or of another route set."""
    assert config.routes is not None
    routes = Path(config.routes)
    ids = read_route_ids(routes)
    require_route_set(ids, config.route_set)
    records = read_records([Path(path) for path in config.results])
    table = make_benchmark_table(records, config.route_set, ids)
    abilities = smoothness = None
    if config.first_junctions is not None:
        junctions = read_first_junctions(Path(config.first_junctions))
        abilities = make_ability_table(records, read_scenario_types(routes), junctions)
    if config.rides is not None:
        smoothness = compute_smoothness(read_rides(records, Path(config.rides)))
    return Graded(table, abilities, smoothness)


def encode_table(graded: Graded) -> bytes:
    """Return the table as JSON, with the parts that were computed beside it."""
    more = {"abilities": graded.abilities, "smoothness": graded.smoothness}
    computed = {name: part for name, part in more.items() if part is not None}
    return msgspec.json.encode({**asdict(graded.table), **computed})


def format_table(graded: Graded) -> str:
    """Return the table as text."""
    table = graded.table
    efficiency = "-" if table.efficiency is None else f"{table.efficiency:.2f}"
    lines = [
        f"{table.route_set}, {table.num_routes} of 220 routes; the others count as 0",
        f"driving score    {table.driving_score:8.2f}",
        f"success rate     {100 * table.success_rate:8.2f} %",
        f"efficiency       {efficiency:>8}",
    ]
    if graded.smoothness is not None:
        lines += [
            f"smoothness       {100 * graded.smoothness.as_published:8.2f} %",
            f"  corrected      {100 * graded.smoothness.corrected:8.2f} %",
        ]
    if graded.abilities is not None:
        left_out = len(graded.abilities.left_out)
        lines.append(f"multi-ability; {left_out} routes that were not driven are left out")
        for name, ability in graded.abilities.abilities.items():
            counts = f"{ability.num_successes} of {ability.num_routes} routes"
            lines.append(f"  {name:<15}{_format_percent(ability.success_ratio)}   {counts}")
        lines.append(f"  {'mean':<15}{_format_percent(graded.abilities.mean)}")
    return "\n".join(lines)


def _format_percent(ratio: float | None) -> str:
    return f"{'-':>8}  " if ratio is None else f"{100 * ratio:8.2f} %"


cli = partial(run_recipe, Launch, EvalBench2DriveConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
