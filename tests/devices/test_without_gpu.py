"""What a GPU runs is tested without one: networks on the meta device, thin stand-ins for calls of CUDA.

A tensor left on the host, a number read, or a shape that depends on numbers fails its path. No meta
device reaches recording on streams and IPC handles: stand-ins run our side of them, and take what the
torch that is installed takes.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from benchmarks.gpu.allowed_waits import ALLOWED
from benchmarks.gpu.crossings import META, Crossings, NotForGpusError, describe
from benchmarks.gpu.meta_paths import PATHS, crossings_of
from benchmarks.gpu.syncs import decision_waits, update_waits
from benchmarks.gpu.tiny_policies import FAMILIES
from benchmarks.gpu.watched_paths import cross, not_allowed
from vla_rl.engines.cuda_graphs import WARM_UPS, CudaRecorder, ReplayedCall
from vla_rl.engines.vllm import staging
from vla_rl.engines.vllm.staging import GpuBuffer, open_memory
from vla_rl.errors import ConfigError
from vla_rl.models import attention
from vla_rl.models.mlp import MlpNetwork

REACHED: set[str] = set()
"""Places at which some path waited, in the order of this file's tests."""

RUN: set[str] = set()


PROOFS = {
    *("act: oft tokens", "act: oft l1", "update: oft tokens", "update: oft film"),
    *("reference: oft tokens", "reference: oft film", "reference: oft l1"),
    *("critic: openvla, shared", "critic: oft adapters, own", "critic: oft l1, shared"),
    *("critic: oft tokens, own", "critic: oft tokens, shared"),
    *("imitation: oft tokens", "imitation: oft l1", "checkpoint: oft tokens"),
    *("build: oft tokens", "build: oft l1", "build: oft film"),
    *("update: openvla, recomputed", "update: openvla, adapted", "update: openvla, merged"),
    *("update: oft tokens, in bfloat16", "update: oft tokens, adapted"),
    *("update: oft l1, recomputed", "update: oft l1, in bfloat16", "update: oft l1, merged"),
}
"""Paths whose code other paths of the suite run: the same step of a family with more parts, or the
same change of another family."""


# in the suite: each loss in micro-batches of 4, and ppo in those of both sizes
PROOFS |= {each for each in PATHS if each.endswith("of 16")} - {
    "update by ppo in micro-batches of 16"
}


assert set(PATHS) > PROOFS


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.proof if each in PROOFS else ()) for each in PATHS],
)
def test_a_path_needs_no_number_of_the_device(name: str) -> None:
    crossings = crossings_of(name)
    RUN.add(name)
    REACHED.update(each.location for each in crossings.found)
    assert not not_allowed(crossings)


@pytest.mark.parametrize(
    ("name", "num_kernels"),
    # two layers; in half precision, one kernel of a GPU reads all rows
    [("update: language, packed", 0), ("update: language, packed, in bfloat16", 2)],
)
def test_packed_paths_read_rows_end_to_end(
    name: str, num_kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[list[int]] = []
    made, calls = attention.PackedRows.from_lengths, list[int]()

    def noted(lengths: list[int], device: torch.device) -> attention.PackedRows:
        lines.append(lengths)
        return made(lengths, device)

    def kernel(query: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        calls.append(len(query))
        return query

    monkeypatch.setattr(attention.PackedRows, "from_lengths", noted)
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    cross(PATHS[name])
    assert [len(lengths) for lengths in lines] == [6]
    assert calls == [sum(lines[0])] * num_kernels


def test_every_allowed_place_is_still_needed() -> None:
    if not set(PATHS) - PROOFS <= RUN:
        pytest.skip("only some of the paths were run")
    assert set(ALLOWED) == REACHED
    assert len(ALLOWED) <= 9, "the list may only shrink"


def rows() -> torch.Tensor:
    return torch.zeros(3, 2, device=META)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: float(rows().sum()),
        lambda: bool((rows() > 0).any()),
        lambda: rows().cpu(),
        lambda: rows().tolist(),
        lambda: torch.equal(rows(), rows()),
        lambda: rows().nonzero(),
        lambda: torch.zeros(3, 2).copy_(rows()),
    ],
)
def test_a_number_that_is_asked_for_is_noted(ask: object) -> None:
    crossings = Crossings()
    with crossings.watched():
        ask()  # type: ignore[operator]
    assert [each.kind for each in crossings.found] == ["wait"], describe(crossings.found)


@pytest.mark.parametrize(
    "upload",
    [
        lambda: torch.zeros(3).to(META),
        lambda: torch.tensor([1.0, 2.0], device=META),
        lambda: rows().copy_(torch.zeros(3, 2)),
        lambda: rows()[[0, 1]],
    ],
)
def test_a_copy_to_the_device_that_waits_is_noted(upload: object) -> None:
    crossings = Crossings()
    with crossings.watched():
        upload()  # type: ignore[operator]
        torch.zeros(3).to(META, non_blocking=True)
    assert [each.kind for each in crossings.found] == ["upload"]


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: rows() + torch.zeros(2),
        lambda: rows()[torch.tensor([0, 1])],
        lambda: rows()[rows() > 0],
        lambda: rows().unique(),
        lambda: rows().repeat_interleave(torch.ones(3, dtype=torch.long, device=META), dim=0),
    ],
)
def test_what_fails_or_waits_unseen_on_a_gpu_fails_here(mistake: object) -> None:
    with Crossings().watched(), pytest.raises(NotForGpusError):
        mistake()  # type: ignore[operator]


PLANTED: dict[str, Callable[[torch.Tensor], object]] = {
    "an .item()": lambda hidden: hidden.sum().item(),
    "a bool(tensor)": lambda hidden: bool(hidden.isfinite().all()),
    "a tensor of the host": lambda hidden: hidden + torch.zeros(hidden.shape[-1]),
    "an upload that waits": lambda hidden: hidden + torch.tensor([1.0], device=hidden.device),
    "a shape that depends on data": lambda hidden: hidden[hidden > 0],
}


@pytest.mark.parametrize("mistake", PLANTED)
@pytest.mark.parametrize("path", ["act: mlp", "update: mlp"])
def test_a_mistake_in_a_network_fails_its_paths(
    path: str, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = MlpNetwork.forward

    def planted(network: MlpNetwork, *args: torch.Tensor) -> object:
        result = forward(network, *args)
        PLANTED[mistake](args[0])
        return result

    monkeypatch.setattr(MlpNetwork, "forward", planted)
    try:
        crossings = cross(PATHS[path])
    except NotForGpusError:
        return
    assert "models/mlp.py" in not_allowed(crossings)


def families(*proofs: str) -> list[Any]:
    """All families; those named are proofs, because others of the suite run the same code."""
    return [
        pytest.param(family, marks=pytest.mark.proof if family in proofs else ())
        for family in FAMILIES
    ]


@pytest.mark.parametrize(
    "family",
    [
        each
        for each in families("oft tokens", "oft film", "oft l1")
        if each.values != ("oft diffusion",)  # it has no likelihood
    ],
)
def test_an_update_waits_once_for_each_optimizer_step(family: str) -> None:
    for_each_step, beyond = update_waits(family)
    assert for_each_step <= 1
    assert beyond <= 1


@pytest.mark.parametrize("family", families("oft tokens", "oft adapters", "oft l1"))
def test_a_batch_of_decisions_waits_once(family: str) -> None:
    assert decision_waits(family) == 1


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
