"""The actor inside a simulator process, called without a process: a broken environment is closed at
once, the others and the process are not touched.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.env_workers.spaces import mark, unmark
from vla_rl.env_workers.worker import EnvWorker
from vla_rl.errors import EnvError
from vla_rl.types import EnvSpec

PUSH = np.ones(1, np.float32)
CALLS: dict[str, Callable[[EnvWorker, int], Awaitable[Any]]] = {
    "reset": lambda worker, env: worker.reset(env, 0, None, 0),
    "step": lambda worker, env: worker.step(env, PUSH.tobytes(), 0),
    "chunk": lambda worker, env: worker.step_chunk(env, PUSH[None], None),
    "render": lambda worker, env: worker.render(env),
    "get_state": lambda worker, env: worker.get_state(env),
    "set_state": lambda worker, env: worker.set_state(env, 3),
}


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the environments that were closed."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "support")
    from sample_envs import Breaking

    Breaking.closed.clear()
    return Breaking.closed


def spec(at: str = "", name: str = "it") -> EnvSpec:
    kwargs = {"at": at, "name": name, "render_mode": "rgb_array"}
    return EnvSpec(id="sample_envs:test/Breaking-v0", kwargs=kwargs)


async def opened(*specs: EnvSpec) -> EnvWorker:
    worker = EnvWorker(len(specs))
    for number, each in enumerate(specs):
        await worker.build_env(number, each)
    return worker


@pytest.mark.parametrize("call", CALLS)
async def test_an_environment_that_breaks_in_any_call_is_closed_at_once(
    call: str, closed: list[str]
) -> None:
    worker = await opened(spec("step" if call == "chunk" else call), spec(name="other"))
    if call != "reset":
        await worker.reset(0, 0, None, 0)
    with pytest.raises(EnvError, match="it broke in"):
        await CALLS[call](worker, 0)
    assert closed == ["it"]
    for later in CALLS.values():
        with pytest.raises(EnvError, match="no environment is open here"):
            await later(worker, 0)
    for faultless in CALLS.values():
        await faultless(worker, 1)
    assert closed == ["it"]


async def test_a_broken_environment_is_built_anew_by_the_next_open(closed: list[str]) -> None:
    worker = await opened(spec("step"))
    await worker.reset(0, 0, None, 0)
    with pytest.raises(EnvError, match="it broke in step"):
        await CALLS["step"](worker, 0)
    await worker.build_env(0, spec(name="next"))
    await CALLS["reset"](worker, 0)
    await worker.build_env(0, spec(name="next"))  # intact, so not built again
    assert (await worker.get_state(0), closed) == (0, ["it"])


async def test_the_first_fault_is_raised_when_closing_fails_too(
    closed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    worker = await opened(spec("step close"))
    await worker.reset(0, 0, None, 0)
    with pytest.raises(EnvError, match="it broke in step"):
        await CALLS["step"](worker, 0)
    assert "closing a broken environment: " in (told := capsys.readouterr().err)
    assert "it broke in close" in told
    with pytest.raises(EnvError, match="no environment is open here"):
        await CALLS["step"](worker, 0)


async def test_a_method_that_raises_leaves_the_environment_open(closed: list[str]) -> None:
    worker = await opened(spec("count"))
    await worker.reset(0, 0, None, 0)
    with pytest.raises(RuntimeError, match="it broke in count"):
        await worker.call_method(0, "count", [], {})
    with pytest.raises(AttributeError):
        await worker.call_method(0, "no_such_method", [], {})
    await CALLS["step"](worker, 0)
    assert unmark(await worker.call_method(0, "get_state", [], {})) == 1
    await worker.set_attribute(0, "render_mode", mark("human", "render_mode"))
    assert unmark(await worker.call_method(0, "render_mode", [], {})) == "human"
    assert closed == []


async def test_all_environments_step_before_the_fault_of_one_is_raised(closed: list[str]) -> None:
    worker = await opened(spec("step", "bad"), spec(name="good"), spec("step", "worse"))
    for number in range(3):
        await worker.reset(number, 0, None, 0)
    with pytest.raises(EnvError, match="bad broke in step"):
        await worker.step_all([PUSH.tobytes()] * 3, 0)
    assert closed == ["bad", "worse"]
    assert await worker.get_state(1) == 1


async def test_the_same_environment_is_not_built_twice_and_another_replaces_it(
    closed: list[str],
) -> None:
    worker = await opened(spec())
    await worker.reset(0, 0, None, 0)
    await CALLS["step"](worker, 0)
    await worker.build_env(0, spec())
    assert (await worker.get_state(0), closed) == (1, [])
    await worker.build_env(0, spec(name="other"))
    assert closed == ["it"]
    await worker.close_env(0)
    await worker.close_env(0)
    assert closed == ["it", "other"]


async def test_stopping_closes_every_environment_and_raises_the_first_fault(
    closed: list[str],
) -> None:
    worker = await opened(spec("close", "bad"), spec(name="good"), spec("close", "worse"))
    with pytest.raises(EnvError, match="bad broke in close"):
        await worker.on_stop()
    assert closed == ["bad", "good", "worse"]


async def test_a_request_that_an_environment_does_not_support_leaves_it_open(
    closed: list[str],
) -> None:
    worker = await opened(EnvSpec(id="sample_envs:test/Odd-v0"))
    await worker.reset(0, 0, None, 0)
    with pytest.raises(TypeError, match="no get_state"):
        await worker.get_state(0)
    await CALLS["step"](worker, 0)
