"""Acting as CUDA graphs: a call's kernels are recorded once for each shape, and launched together from then on.

    rows ─► filled up ─┬─ a known shape ─► copied to the recording's place ─► replay ─► the rows asked for
                       └─ a new one ─► run for warm-up, record

Launching the thousands of kernels of a large network one by one takes longer than a GPU needs for a few rows. A recording
reads the weights where they lie, so updates in place are seen; weights that were moved void it.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from vla_rl.errors import ConfigError

Tensors: TypeAlias = tuple[Tensor, ...]
Compute: TypeAlias = Callable[..., Tensors]
"""Tensors [B, ...] to tensors [B, ...], row by row; it waits for nothing on the host."""

MOST_RECORDINGS: Final = 32
"""Shapes that are kept; the one that was not asked for longest goes first."""

WARM_UPS: Final = 3


@runtime_checkable
class ReplayedModel(Protocol):
    """A model that can act by recordings."""

    def replay_acting(self, is_wanted: bool) -> None:
        """Whether acting without a gradient is recorded and replayed from now on; if not, recordings are given up.

        For a network on a GPU.
        """
        ...


class Recording(Protocol):
    """A call with inputs of fixed shapes.

    Attributes:
        inputs: where the next replay reads them.
    """

    inputs: Tensors

    def replay(self) -> Tensors:
        """The results, in place of those of the last replay of whatever shares its memory."""
        ...


Record: TypeAlias = Callable[[Compute, Tensors], Recording]


class CudaRecorder:
    """Records calls on the current CUDA device. They share the memory that they compute with: one is replayed at a time."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute, inputs: Tensors) -> "CudaRecording":
        """Raises: ConfigError where the call cannot be recorded, as it waits for the device."""
        return CudaRecording(compute, inputs, self._pool)


class CudaRecording:
    """A call as a CUDA graph. See `Recording`; made by `CudaRecorder`."""

    def __init__(self, compute: Compute, inputs: Tensors, pool: Any) -> None:
        self.inputs = inputs
        warm_up = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            for _ in range(WARM_UPS):
                compute(*inputs)
        torch.cuda.current_stream().wait_stream(warm_up)
        self._graph = torch.cuda.CUDAGraph()
        try:
            # the host thread prepares the next batch on the same device meanwhile
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self._results = compute(*inputs)
        except RuntimeError as error:  # the stream and the allocator are left half way: no going on from here
            raise ConfigError(
                f"EngineConfig.cuda_graphs is True, but acting cannot be recorded as a CUDA graph ({error}); set it to "
                "False (--engine.no-cuda-graphs)"
            ) from error

    def replay(self) -> Tensors:
        """The results, in place of those of the last replay."""
        self._graph.replay()
        return self._results


class ReplayedCall:
    """A call that is recorded once for each shape and replayed. Used by one thread at a time.

    Args:
        network: whose parameters it reads; they may change in place, and nothing else that it reads may.
        record: makes a recording.
    """

    def __init__(self, network: nn.Module, record: Record) -> None:
        self._record = record
        self._parameters = [
            (module._parameters, name)
            for module in network.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._recordings: dict[tuple[object, ...], Recording] = {}
        self._weights_at: list[int] = []

    @property
    def num_recordings(self) -> int:
        """Shapes that are recorded now."""
        return len(self._recordings)

    def __call__(self, compute: Compute, *inputs: Tensor) -> Tensors:
        """What `compute`, the same each time, makes of inputs [B, ...], in tensors of their own."""
        with torch.inference_mode():
            recording = self._recording_for(compute, inputs)
            num_rows = len(inputs[0])
            for place, rows in zip(recording.inputs, inputs, strict=True):
                _fill(place, rows)
            return tuple(result[:num_rows].clone() for result in recording.replay())

    def _recording_for(self, compute: Compute, inputs: Tensors) -> Recording:
        """The recording of such inputs, made where there is none."""
        weights_at = [parameters[name].data_ptr() for parameters, name in self._parameters]  # type: ignore[union-attr]
        if weights_at != self._weights_at:
            self._recordings.clear()
            self._weights_at = weights_at
        num_rows = filled_up(len(inputs[0]))
        shapes = (num_rows, *((rows.shape[1:], rows.dtype) for rows in inputs))
        recording = self._recordings.pop(shapes, None)
        if recording is None:
            if len(self._recordings) == MOST_RECORDINGS:
                del self._recordings[next(iter(self._recordings))]
            recording = self._record(compute, tuple(_filled(rows, num_rows) for rows in inputs))
        self._recordings[shapes] = recording
        return recording


def filled_up(num_rows: int) -> int:
    """Rows that so many are computed as: 1, 2, 4, and then multiples of 4. Few shapes exist, and few rows are idle."""
    return 1 << (num_rows - 1).bit_length() if num_rows <= 4 else -(-num_rows // 4) * 4


def _filled(rows: Tensor, num_rows: int) -> Tensor:
    filled = rows.new_empty(num_rows, *rows.shape[1:])
    _fill(filled, rows)
    return filled


def _fill(place: Tensor, rows: Tensor) -> None:
    """Copy rows to the beginning of a place; the last one again and again to its rest."""
    num_rows = len(rows)
    place[:num_rows].copy_(rows)
    if num_rows < len(place):
        place[num_rows:].copy_(rows[-1:].expand(len(place) - num_rows, *rows.shape[1:]))
