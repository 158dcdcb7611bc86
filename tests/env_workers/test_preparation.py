"""Simulators that are forked from one process which has prepared what they share."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorConfig, SimulatorPool, make_vec, open_env
from vla_rl.env_workers.make_env import prepare_hook
from vla_rl.errors import ActorFrozen, ConfigError, EnvError
from vla_rl.types import EnvSpec, EpisodeSpec, Info

Episode = Callable[..., EpisodeSpec]
SUPPORT = Path(__file__).parent / "support"
BIG = EnvSpec(id="sample_envs:test/Big-v0", kwargs={"colour": "blue"})


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SUPPORT)


def episode_of(spec: EnvSpec, number: int, **options: Any) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id=number,
        group_id=number,
        member=0,
        env=spec,
        task="t",
        seed=number,
        policy_seed=number,
        options=options,
    )


async def first_info(pool: SimulatorPool, spec: EpisodeSpec) -> Info:
    async with pool.lease(spec) as env:
        return (await env.reset())[1]


async def infos_of_two(pool: SimulatorPool, spec: EnvSpec) -> list[Info]:
    """The first info in each of two processes."""
    async with pool.lease(episode_of(spec, 0)) as one, pool.lease(episode_of(spec, 1)) as two:
        return [(await one.reset())[1], (await two.reset())[1]]


async def test_what_a_class_prepares_is_built_once_and_shared_by_all_processes(
    runtime: Runtime,
) -> None:
    config = SimulatorConfig(num_envs=2)
    async with asyncio.timeout(60), SimulatorPool(runtime, config, specs=[BIG, BIG]) as pool:
        one, two = await infos_of_two(pool, BIG)
        assert one["pid"] != two["pid"]
        assert one["parent"] == two["parent"] == one["made_by"] == two["made_by"]
        # what is no concern of the preparation reaches the constructor
        assert one["colour"] == "blue"
        assert one["draw"] != two["draw"]
        assert pool.metrics()["simulation/private_mb_max"] < 40  # without the model of 64 MiB


async def test_spawned_processes_build_it_each_for_themselves(runtime: Runtime) -> None:
    config = SimulatorConfig(num_envs=2, start="spawn")
    async with asyncio.timeout(60), SimulatorPool(runtime, config, specs=[BIG]) as pool:
        infos = await infos_of_two(pool, BIG)
        assert [info["made_by"] for info in infos] == [info["pid"] for info in infos]
        assert {info["parent"] for info in infos} == {os.getpid()}
        assert pool.metrics()["simulation/private_mb_max"] > 64


async def test_an_environment_that_was_not_announced_can_be_run_too(runtime: Runtime) -> None:
    other = EnvSpec(id="sample_envs:test/Heavy-v0", kwargs={"megabytes": 2})
    async with asyncio.timeout(60), SimulatorPool(runtime, SimulatorConfig(), specs=[BIG]) as pool:
        info = await first_info(pool, episode_of(other, 0))
        assert info["made_by"] == info["pid"]


async def test_a_vector_env_and_a_single_one_prepare_what_they_run(runtime: Runtime) -> None:
    async with asyncio.timeout(60), open_env(runtime, BIG) as env:
        info = (await env.reset())[1]
        assert info["made_by"] == info["parent"]


def test_a_spec_is_prepared_once_however_often_it_will_be_run() -> None:
    red, blue = (
        EnvSpec(id="a:b-v0", kwargs={"colour": "red"}),
        EnvSpec(id="a:b-v0", kwargs={"colour": "blue"}),
    )
    hook = prepare_hook([red, blue, red])
    assert hook.function == "vla_rl.env_workers.make_env:prepare_envs"
    assert hook.kwargs["specs"] == [
        {"id": "a:b-v0", "kwargs": {"colour": "red"}},
        {"id": "a:b-v0", "kwargs": {"colour": "blue"}},
    ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("StartsThread", r"preparing it left 1 threads running in the fork server \(prefetcher\)"),
        ("OpensDisplay", r"preparing it loaded .*start=\"spawn\""),
        (
            "Nothing",
            r"could not be made: the module 'sample_envs' registers no 'test/Nothing-v0'",
        ),
    ],
)
async def test_a_preparation_that_would_spoil_the_forks_ends_the_pool_with_the_reason(
    runtime: Runtime, name: str, reason: str
) -> None:
    spec = EnvSpec(id=f"sample_envs:test/{name}-v0")
    with pytest.raises(EnvError, match=reason):
        async with asyncio.timeout(60), SimulatorPool(runtime, SimulatorConfig(), specs=[spec]):
            pass


async def test_a_preparation_that_hangs_ends_the_pool_at_its_time(runtime: Runtime) -> None:
    spec, reason = EnvSpec(id="sample_envs:test/Hangs-v0"), ""
    async with asyncio.timeout(90):
        for limit_s in (4.0, 16.0, 30.0):  # a slow machine may still import at the first
            with pytest.raises(
                EnvError, match=rf"not prepared in time: .* did not end within {limit_s:g} s"
            ) as caught:
                async with SimulatorPool(
                    runtime, SimulatorConfig(prepare_timeout_s=limit_s), specs=[spec]
                ):
                    pass
            reason = str(caught.value)
            if "prepare_envs did not end" in reason:
                break
    assert "prepare_envs did not end" in reason


async def test_a_forked_simulator_whose_reset_hangs_is_killed_and_its_episode_runs_again(
    runtime: Runtime, tmp_path: Path
) -> None:
    config = SimulatorConfig(num_envs=1, reset_timeout_s=5.0)
    spec = episode_of(BIG, 3, hang_once=str(tmp_path / "hung"))
    async with asyncio.timeout(60), SimulatorPool(runtime, config, specs=[BIG]) as pool:
        (frozen,) = pool.pids
        with pytest.raises(ActorFrozen):
            await first_info(pool, spec)
        info = await first_info(pool, spec)
        assert info["pid"] != frozen
        assert info["made_by"] == info["parent"]  # the next fork of the same process
        assert pool.metrics()["simulation/replaced/frozen"] == 1


async def test_render_devices_are_dealt_out_to_the_forks_of_one_process(runtime: Runtime) -> None:
    config = SimulatorConfig(num_envs=2, render_devices=(4, 6))
    async with asyncio.timeout(60), SimulatorPool(runtime, config, specs=[BIG]) as pool:
        one, two = await infos_of_two(pool, BIG)
        assert {one["device"], two["device"]} == {"4", "6"}
        assert one["parent"] == two["parent"]


async def test_an_interpreter_that_will_not_do_ends_the_pool_before_it_begins(
    runtime: Runtime, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"python is '.*', which is not an executable file"):
        async with (
            asyncio.timeout(60),
            SimulatorPool(runtime, SimulatorConfig(python=str(tmp_path / "python"))),
        ):
            pass


async def test_a_package_that_another_interpreter_lacks_is_looked_for_there(
    runtime: Runtime,
) -> None:
    spec = EnvSpec(id="no_such_simulator:its/env-v0")
    with pytest.raises(
        EnvError, match=rf"in the interpreter {sys.executable}, .*no module 'no_such_simulator'"
    ):
        async with (
            asyncio.timeout(60),
            SimulatorPool(runtime, SimulatorConfig(python=sys.executable), specs=[spec]),
        ):
            pass


@pytest.mark.parametrize("start", ["fork", "spawn"])
async def test_simulators_can_run_in_another_interpreter(runtime: Runtime, start: Any) -> None:
    config = SimulatorConfig(
        python=sys.executable, start=start, environment={"PYTHONPATH": str(SUPPORT)}
    )
    async with asyncio.timeout(60), SimulatorPool(runtime, config, specs=[BIG]) as pool:
        info = await first_info(pool, episode_of(BIG, 0))
        assert (info["made_by"] == info["parent"]) == (start == "fork")


@pytest.mark.parametrize(
    "env_id",
    [
        pytest.param("CartPole-v1", marks=pytest.mark.proof),  # test_vector.py has it
        pytest.param("Pendulum-v1", marks=pytest.mark.proof),
        "Reacher-v5",
    ],
)
def test_environments_of_other_packages_run_as_processes(env_id: str) -> None:
    envs = make_vec(env_id, num_envs=2)
    try:
        first, _ = envs.reset(seed=3)
        again, _ = envs.reset(seed=3)
        assert (first == again).all()
        assert envs.step(envs.action_space.sample())[1].shape == (2,)
    finally:
        envs.close()
