"""Whatever an exception holds, its report leaves, and the process that it was raised in stays."""

import asyncio

import msgspec
import numpy as np
import pytest
from sample_actors import Counter, Unspeakable

from vla_rl.actors import ChildProcess, InLoop, Placement, Runtime
from vla_rl.util.error_reports import make_report, restore_error


class Odd(Exception):
    """An exception whose own code is broken."""

    @property
    def args(self) -> tuple[object, ...]:  # type: ignore[override]
        raise OSError("no arguments")


@pytest.mark.parametrize("placement", [InLoop(), ChildProcess()], ids=["in_loop", "child_process"])
async def test_an_exception_that_cannot_be_written_as_it_is_reaches_its_caller(
    placement: Placement,
) -> None:
    async with asyncio.timeout(30), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=placement)
        with pytest.raises(ValueError, match=r"caf\\\\udcff"):
            await counter.raise_surrogate()
        with pytest.raises(ValueError, match=r"its __repr__ raised RuntimeError"):
            await counter.raise_unspeakable()
        assert await counter.add(2) == 2


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError(Unspeakable()), "its __repr__ raised RuntimeError"),
        (ValueError("caf\udcff"), "caf\\udcff"),
        (ValueError(np.longdouble(1.5)), "1.5"),
        (ValueError([1 << 70, np.float32(0.5)]), "0.5"),
        (Odd(), "its report failed with OSError"),
    ],
)
def test_every_report_can_be_sent(error: Exception, words: str) -> None:
    report = make_report(error)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=type(report)) == report
    assert words in str(restore_error(report, "counter", 7))


def test_an_argument_that_holds_itself_is_reported() -> None:
    endless: list[object] = []
    endless.append(endless)
    assert "its report failed with RecursionError" in make_report(ValueError(endless)).message
