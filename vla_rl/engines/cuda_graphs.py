"""Acting as CUDA graphs: a call's kernels are recorded once for each shape, and launched together from then on.

    rows ─► filled up to a power of two ─┬─ a known shape ─► copied to the recording's place ─► replay ─► the rows asked for
                                         └─ a new one ─► run for warm-up, record

Launching the thousands of kernels of a large network one by one takes longer than a GPU needs for a few rows. A recording
reads the weights where they lie, so updates in place are seen; weights that were moved void it.
"""

import logging
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

_log = logging.getLogger(__name__)

Tensors: TypeAlias = tuple[Tensor, ...]
Compute: TypeAlias = Callable[..., Tensors]
"""Tensors [B, ...] to tensors [B, ...], row by row; it waits for nothing on the host."""

MOST_RECORDINGS: Final = 32
"""Shapes that are kept; the one that was not asked for longest goes first."""

WARM_UPS: Final = 3


@runtime_checkable
class ReplayedModel(Protocol):
    """A model that can act by recordings."""

    def replay_acting(self) -> None:
        """From now on acting without a gradient is recorded and replayed. For a network on a GPU."""
        ...


class Recording(Protocol):
    """A call with inputs of fixed shapes.

    Attributes:
        inputs: where the next replay reads them.
    """

    inputs: Tensors

    def replay(self) -> Tensors:
        """The results, in place of those of the last replay."""
        ...


Record: TypeAlias = Callable[[Compute, Tensors], Recording]


class CudaRecording:
    """A call on the current CUDA device. Raises: RuntimeError where it cannot be recorded, as it waits for the device."""

    def __init__(self, compute: Compute, inputs: Tensors) -> None:
        self.inputs = inputs
        warm_up = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            for _ in range(WARM_UPS):
                compute(*inputs)
        torch.cuda.current_stream().wait_stream(warm_up)
        self._graph = torch.cuda.CUDAGraph()
        # the host thread prepares the next batch on the same device meanwhile
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._results = compute(*inputs)

    def replay(self) -> Tensors:
        """The results, in place of those of the last replay."""
        self._graph.replay()
        return self._results


class ReplayedCall:
    """`compute`, recorded once for each shape and replayed. Used by one thread at a time.

    A call that cannot be recorded is computed kernel by kernel from then on, which one line of the log says.

    Args:
        compute: reads the parameters of `network` and nothing else that changes, but its arguments.
        network: whose parameters may change in place.
        record: makes a recording.
    """

    def __init__(self, compute: Compute, network: nn.Module, record: Record = CudaRecording) -> None:
        self._compute, self._network, self._record = compute, network, record
        self._recordings: dict[tuple[object, ...], Recording] = {}
        self._weights_at: tuple[int, ...] = ()
        self._is_recordable = True

    @property
    def num_recordings(self) -> int:
        """Shapes that are recorded now."""
        return len(self._recordings)

    def __call__(self, *inputs: Tensor) -> Tensors:
        """The results for inputs [B, ...], in tensors of their own."""
        with torch.inference_mode():
            recording = self._recording_for(inputs) if self._is_recordable else None
            if recording is None:
                return self._compute(*inputs)
            num_rows = len(inputs[0])
            for place, rows in zip(recording.inputs, inputs, strict=True):
                _fill(place, rows)
            return tuple(result[:num_rows].clone() for result in recording.replay())

    def _recording_for(self, inputs: Tensors) -> Recording | None:
        """The recording of such inputs, made where there is none; None where it cannot be made."""
        weights_at = tuple(parameter.data_ptr() for parameter in self._network.parameters())
        if weights_at != self._weights_at:
            self._recordings.clear()
            self._weights_at = weights_at
        num_rows = 1 << (len(inputs[0]) - 1).bit_length()
        shapes = (num_rows, *((rows.shape[1:], rows.dtype) for rows in inputs))
        recording = self._recordings.pop(shapes, None)
        if recording is None:
            if len(self._recordings) == MOST_RECORDINGS:
                del self._recordings[next(iter(self._recordings))]
            try:
                recording = self._record(self._compute, tuple(_filled(rows, num_rows) for rows in inputs))
            except RuntimeError as error:
                self._is_recordable = False
                self._recordings.clear()
                _log.warning("acting is not replayed, but computed kernel by kernel: %s", error)
                return None
        self._recordings[shapes] = recording
        return recording


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
