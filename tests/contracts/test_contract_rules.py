"""The rules of `vla_rl.testing`: what the package has keeps them, what breaks one fails its test.

Policies, engines and actors are here, environments in test_env_contract.py; tests/engines/vllm holds
vLLM's engines to the same rules. Each rule is broken by an implementation, in a plain pytest.
"""

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from broken_contracts import FAULTS
from sample_actors import Counter, Streamer
from small_episodes import make_drawing_policy
from small_policies import completing_policy, observe, oft_policy, token_policy

from vla_rl import testing
from vla_rl.actors import ChildProcess, ForkServer
from vla_rl.cluster.hosts import HostMonitor
from vla_rl.engines import (
    DeviceLane,
    EngineConfig,
    PolicyModel,
    TorchActionEngine,
    TorchChatEngine,
)
from vla_rl.env_workers.worker import EnvWorker
from vla_rl.models.language import CausalLanguageModel
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.models.openvla_oft import ContinuousOpenVlaOft, tiny
from vla_rl.remote_rollout.image_cache import ImageCache
from vla_rl.testing import (
    ActionEngineContract,
    ActorContract,
    ChatEngineContract,
    EmbodiedEnvContract,
    PolicyContract,
)
from vla_rl.types import EnvSpec, Observation

SUPPORT = Path(__file__).parent / "support"

CONTRACTS = {
    "Envs": EmbodiedEnvContract,
    "Policies": PolicyContract,
    "ActionEngines": ActionEngineContract,
    "ChatEngines": ChatEngineContract,
    "Actors": ActorContract,
}


FIRST = {base.__name__: next(iter(faults)) for base, faults in FAULTS.items()}
"""One implementation for each contract: all of them take a minute of CPU time."""


class TestMlp(PolicyContract):
    def make_policy(self) -> PolicyModel[Any]:
        shape = MlpConfig(
            state_size=3, action_low=(-2.0, 0.0), action_high=(2.0, 1.0), num_bins=5, chunk_size=2
        )
        return MlpPolicy.create(shape, seed=0)

    def make_observations(self) -> list[Observation]:
        rng = np.random.default_rng(0)
        return [{"state": rng.normal(size=3).astype(np.float32)} for _ in range(6)]


class TestAPolicyThatDrawsMoreThanTokens(PolicyContract):
    greedy_has_noise = True

    def make_policy(self) -> PolicyModel[Any]:
        return make_drawing_policy()

    def make_observations(self) -> list[Observation]:
        return [{"state": np.array([number, -1.0], np.float32)} for number in range(5)]


class OfImages(PolicyContract):
    def make_observations(self) -> list[Observation]:
        return [observe(seed) for seed in range(3)]


class TestOpenVla(OfImages):
    def make_policy(self) -> PolicyModel[Any]:
        return token_policy()


class TestOpenVlaOft(OfImages):
    def make_policy(self) -> PolicyModel[Any]:
        return oft_policy()


class TestContinuousOpenVlaOft(OfImages):
    def make_policy(self) -> PolicyModel[Any]:
        return ContinuousOpenVlaOft.create(tiny(image_size=28, head="l1"), seed=0)


@asynccontextmanager
async def opened_in_this_process(engine: Any, policy: Any) -> AsyncIterator[Any]:
    async with DeviceLane(1) as lane, engine(policy, lane, EngineConfig(max_reply=24)) as opened:
        opened.lane = lane
        yield opened


class TestTorchActionEngine(ActionEngineContract):
    def make_policy(self) -> Any:
        return token_policy()

    def make_observation(self, number: int) -> Observation:
        return observe(number)

    def open_engine(self) -> Any:
        return opened_in_this_process(TorchActionEngine, self.make_policy())

    async def publish(self, engine: Any, policy: Any, version: int) -> None:
        await engine.lane.run(engine.apply_weights, policy.network, version)


class TestTorchChatEngine(ChatEngineContract):
    def make_policy(self) -> CausalLanguageModel:
        return completing_policy()

    def open_engine(self) -> Any:
        return opened_in_this_process(TorchChatEngine, self.make_policy())


FORKED = ChildProcess(fork_from=ForkServer(imports=("sample_actors",)))


class TestCounter(ActorContract):
    actor = Counter
    arguments = (3,)
    in_process = FORKED

    async def use(self, actor: Counter) -> Any:
        return await actor.add(2), await actor.echo_array(np.arange(3)), await actor.seen()


class TestStreamer(ActorContract):
    actor = Streamer
    in_process = FORKED

    async def use(self, actor: Streamer) -> Any:
        return [number async for number in actor.count(5)], await actor.made()


class TestHostMonitor(ActorContract):
    actor = HostMonitor

    async def use(self, actor: HostMonitor) -> Any:
        return (await actor.report()).versions


class TestEnvWorker(ActorContract):
    actor = EnvWorker
    arguments = (1,)

    async def use(self, actor: EnvWorker) -> Any:
        described = await actor.build_env(0, EnvSpec(id="vla_rl/toy_reach-v0"))
        _, info = await actor.reset(0, 5, None, 0)
        return described.observation_space, info


class TestImageCache(ActorContract):
    actor = ImageCache
    arguments = (1 << 20,)

    async def use(self, actor: ImageCache) -> Any:
        return await actor.ping()


def run_broken(folder: Path, *options: str) -> dict[str, set[str]]:
    """Return the failed tests of each class of `broken_contracts`, in a pytest without plugins."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", str(SUPPORT / "broken_contracts.py"), "-q", "-rfE"),
            *("-c", str(folder / "pytest.ini"), "--tb=line", "-p", "no:cacheprovider"),
            *("--noconftest", *options),
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "BROKEN_CONTRACTS_FOLDER": str(folder),
            "BROKEN_CONTRACTS_PID": "",  # set by this process's own import
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert "\nERROR" not in done.stdout, done.stdout[-5000:] + done.stderr[-3000:]
    found: dict[str, set[str]] = {}
    for name, test in re.findall(r"^FAILED \S*::Test(\w+)::(test_\w+)", done.stdout, re.MULTILINE):
        found.setdefault(name, set()).add(test)
    return found


def expected(faults: dict[type, dict[str, str]]) -> dict[str, set[str]]:
    return {
        f"{base.__name__}_{name}": {test}
        for base, broken in faults.items()
        for name, test in broken.items()
    }


def test_an_implementation_that_breaks_a_rule_fails_its_test(tmp_path: Path) -> None:
    wanted = {
        base: {name: test for name, test in faults.items() if name == FIRST[base.__name__]}
        for base, faults in FAULTS.items()
    }
    chosen = " or ".join(f"{kind}_{name}" for kind, name in FIRST.items())
    assert run_broken(tmp_path, "-k", chosen) == expected(wanted)


@pytest.mark.proof
def test_every_rule_is_broken_by_an_implementation_that_fails_its_test(tmp_path: Path) -> None:
    assert run_broken(tmp_path) == expected(FAULTS)


@pytest.mark.parametrize("kind", CONTRACTS)
def test_every_rule_has_an_implementation_that_breaks_it(kind: str) -> None:
    rules = {name for name in dir(CONTRACTS[kind]) if name.startswith("test_")}
    (faults,) = [faults for base, faults in FAULTS.items() if base.__name__ == kind]
    assert set(faults.values()) == rules


def test_without_pytest_the_contracts_name_what_is_missing() -> None:
    code = "import sys; sys.modules['pytest'] = None; import vla_rl.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "vla_rl.testing needs pytest; run `pip install pytest`." in done.stderr
    assert set(testing.__all__) >= {contract.__name__ for contract in CONTRACTS.values()}
