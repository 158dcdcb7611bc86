"""The few calls of CUDA that no meta device reaches: recording on streams, and IPC handles. Thin
stand-ins run our side of them, and take what the torch that is installed takes."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from vla_rl.engines.cuda_graphs import WARM_UPS, CudaRecorder, ReplayedCall
from vla_rl.engines.vllm import staging
from vla_rl.engines.vllm.staging import GpuBuffer, open_memory
from vla_rl.errors import ConfigError


class Stream:
    """Notes for which stream it waits."""

    def __init__(self, noted: list[str], name: str = "warm-up") -> None:
        self._noted, self.name = noted, name

    def wait_stream(self, stream: "Stream") -> None:
        self._noted.append(f"{self.name} waits for {stream.name}")


class Graph:
    """Runs nothing; what was computed while it recorded stays where it is."""

    def __init__(self, noted: list[str]) -> None:
        self._noted = noted

    def replay(self) -> None:
        self._noted.append("replay")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of CUDA that were made, in order; each takes the real one's arguments."""
    noted: list[str] = []

    def take(name: str, fake: Callable[..., Any]) -> None:
        real = inspect.signature(getattr(torch.cuda, name))

        def checked(*args: Any, **kwargs: Any) -> Any:
            real.bind(*args, **kwargs)
            return fake(*args, **kwargs)

        monkeypatch.setattr(torch.cuda, name, checked)

    @contextmanager
    def stream(stream: Stream) -> Iterator[None]:
        noted.append(f"on {stream.name}")
        yield
        noted.append(f"off {stream.name}")

    @contextmanager
    def graph(recorded: Graph, *, pool: object, capture_error_mode: str) -> Iterator[None]:
        noted.append(f"record in {pool}, errors {capture_error_mode}")
        yield
        noted.append("recorded")

    take("graph_pool_handle", lambda: "pool")
    take("current_stream", lambda: Stream(noted, "main"))
    take("stream", stream)
    take("graph", graph)
    # classes made by C, without a signature of their own
    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(noted))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(noted))
    return noted


def test_a_call_is_warmed_up_beside_the_main_stream_and_recorded_once(noted: list[str]) -> None:
    calls: list[int] = []

    def doubled(rows: Tensor) -> tuple[Tensor]:
        calls.append(len(rows))
        return (2.0 * rows,)

    replayed = ReplayedCall(torch.nn.Linear(1, 1), CudaRecorder())
    for _ in range(2):
        replayed(doubled, torch.ones(3, 2))
    assert calls == [4] * (WARM_UPS + 1)
    assert noted == [
        "warm-up waits for main",
        "on warm-up",
        "off warm-up",
        "main waits for warm-up",
        "record in pool, errors thread_local",
        "recorded",
        "replay",
        "replay",
    ]


def test_a_call_that_waits_while_it_is_recorded_is_refused(noted: list[str]) -> None:
    def waiting(rows: Tensor) -> tuple[Tensor]:
        if noted[-1].startswith("record"):
            raise RuntimeError("operation not permitted when stream is capturing")
        return (rows,)

    with pytest.raises(ConfigError, match=r"--engine\.no-cuda-graphs"):
        ReplayedCall(torch.nn.Linear(1, 1), CudaRecorder())(waiting, torch.ones(1, 2))


@pytest.mark.parametrize(
    ("real", "fake", "method"),
    [
        (torch.cuda.Stream, Stream, "wait_stream"),
        (torch.cuda.CUDAGraph, Graph, "replay"),
    ],
)
def test_methods_of_stand_ins_take_what_the_real_ones_take(
    real: type, fake: type, method: str
) -> None:
    taken, expected = (
        list(inspect.signature(getattr(kind, method)).parameters) for kind in (fake, real)
    )
    assert taken == expected


class SharedStorage:
    """A storage of a GPU that is shared by the handles of CUDA IPC."""

    device = torch.device("cuda:0")

    @property
    def _untyped_storage(self) -> "SharedStorage":
        return self

    def _share_cuda_(self) -> tuple[Any, ...]:
        return 0, b"handle", 64, 8, b"counter", 1, b"event", True

    def _weak_ref(self) -> int:
        return 0


class GpuTensor:
    """Bytes on a GPU, as far as `reduce_tensor` asks for them."""

    requires_grad, is_nested, layout = False, False, torch.strided
    dtype, device, _backward_hooks = torch.uint8, torch.device("cuda:0"), None

    def _typed_storage(self) -> SharedStorage:
        return SharedStorage()

    def size(self) -> tuple[int, ...]:
        return (64,)

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def storage_offset(self) -> int:
        return 0


class Gpu:
    uuid = "GPU-1"


def test_weights_on_a_gpu_are_opened_with_the_handles_that_they_were_shared_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rebuilt: list[dict[str, Any]] = []
    real = inspect.signature(rebuild_cuda_tensor)

    def rebuild(*args: Any) -> Tensor:
        rebuilt.append(dict(real.bind(*args).arguments))
        return torch.zeros(64, dtype=torch.uint8)

    monkeypatch.setattr(torch, "empty", lambda *_, **__: GpuTensor())
    # its cache of storages holds weak references, which only real ones have
    monkeypatch.setattr("torch.multiprocessing.reductions.StorageWeakRef", lambda storage: storage)
    monkeypatch.setattr("torch.multiprocessing.reductions.shared_cache", {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Gpu())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(staging, "rebuild_cuda_tensor", rebuild)
    shared = GpuBuffer(64, torch.device("cuda:0")).shared()
    staging._open_on_gpu.cache_clear()
    assert len(open_memory(shared)) == 64
    staging._open_on_gpu.cache_clear()
    (found,) = rebuilt
    sent = dict(real.bind(*reduce_tensor(GpuTensor())[1]).arguments)
    handles = [name for name in sent if name not in ("tensor_cls", "storage_cls")]
    assert {name: found[name] for name in handles} == {name: sent[name] for name in handles}
