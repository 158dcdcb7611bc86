"""Acting with CUDA graphs.

The kernels of a call are recorded once per shape, and later launched together.

    rows ─► padded ─┬─ a known shape ─► copied to the recording's inputs ─► replay ─► the requested rows
                    └─ a new shape   ─► run for warm-up, record

Launching the thousands of kernels of a large network one by one takes longer than a GPU needs for a
few rows. A recording reads the weights at their addresses: it follows updates in place, and is
discarded if weights were moved.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from vla_rl.errors import ConfigError

Tensors: TypeAlias = tuple[Tensor, ...]
Compute: TypeAlias = Callable[..., Tensors]
"""Function from tensors [B, ...] to tensors [B, ...], row by row, that never waits on the host for
the device."""

MAX_RECORDINGS: Final = 32
"""Maximum number of recorded shapes; the least recently used one is discarded first."""

WARM_UPS: Final = 3


@runtime_checkable
class ReplayedModel(Protocol):
    """A model that can act with recordings."""

    def replay_acting(self, is_wanted: bool) -> None:
        """Turn recording and replay of acting without a gradient on or off.

        Turning it off discards the recordings.

        Needs a network on a GPU.
        """
        ...


class Recording(Protocol):
    """A call with inputs of fixed shapes.

    Attributes:
        inputs: tensors that the next replay reads.
    """

    inputs: Tensors

    def replay(self) -> Tensors:
        """Run the recording and return its results.

        The next replay that shares its memory overwrites them.
        """
        ...


Record: TypeAlias = Callable[[Compute, Tensors], Recording]


class CudaRecorder:
    """Records calls on the current CUDA device.

    All recordings share the memory for their computation, so only one is replayed at a time.
    """

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute, inputs: Tensors) -> "CudaRecording":
        """Record a call.

        Raises: ConfigError if the call cannot be recorded, because it waits for the device.
        """
        return CudaRecording(compute, inputs, self._pool)


class CudaRecording:
    """A call recorded as a CUDA graph. See `Recording`; made by `CudaRecorder`."""

    def __init__(self, compute: Compute, inputs: Tensors, pool: Any) -> None:
        self.inputs = inputs
        warm_up = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            # under the modes around it: this is the call that a counter of arithmetic sees, because
            # blocks that it watches run uncompiled, and the recording has to hold the compiled ones
            compute(*inputs)
            with _disable_current_modes():
                for _ in range(WARM_UPS - 1):
                    compute(*inputs)
        torch.cuda.current_stream().wait_stream(warm_up)
        self._graph = torch.cuda.CUDAGraph()
        try:
            # while this records, the host thread prepares the next batch on the same device
            with (
                torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"),
                _disable_current_modes(),
            ):
                self._results = compute(*inputs)
        except RuntimeError as error:
            # fatal: stream and allocator are left in the middle of a recording
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                "EngineConfig.cuda_graphs is True, but acting cannot be recorded as a CUDA graph "
                f"({reason}); set it to False (--engine.no-cuda-graphs)"
            ) from error

    def replay(self) -> Tensors:
        """Run the recording and return its results; the next replay overwrites them."""
        self._graph.replay()
        return self._results


class ReplayedCall:
    """A function that is recorded once per input shape and replayed.

    Use it from one thread at a time.

    Args:
        network: holds the parameters that the function reads; they may change in place, anything
            else that it reads may not.
        record: makes recordings.
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
        """Number of recorded shapes."""
        return len(self._recordings)

    def __call__(self, compute: Compute, *inputs: Tensor) -> Tensors:
        """Return the results of `compute` for inputs [B, ...], in new tensors.

        `compute` has to be the same in every call.
        """
        with torch.inference_mode():
            recording = self._get_recording(compute, inputs)
            num_rows = len(inputs[0])
            for recorded, rows in zip(recording.inputs, inputs, strict=True):
                _copy_padded(recorded, rows)
            return tuple(result[:num_rows].clone() for result in recording.replay())

    def _get_recording(self, compute: Compute, inputs: Tensors) -> Recording:
        """Return the recording for inputs of this shape; record it if there is none."""
        weights_at = [parameters[name].data_ptr() for parameters, name in self._parameters]  # type: ignore[union-attr]
        if weights_at != self._weights_at:
            self._recordings.clear()
            self._weights_at = weights_at
        num_rows = pad_num_rows(len(inputs[0]))
        shapes = (num_rows, *((rows.shape[1:], rows.dtype) for rows in inputs))
        recording = self._recordings.pop(shapes, None)
        if recording is None:
            if len(self._recordings) == MAX_RECORDINGS:
                del self._recordings[next(iter(self._recordings))]
            recording = self._record(compute, tuple(_pad_rows(rows, num_rows) for rows in inputs))
        self._recordings[shapes] = recording
        return recording


def pad_num_rows(num_rows: int) -> int:
    """Return the number of rows to pad to: 1, 2, 4, and then multiples of 4.

    So there are few shapes and few idle rows.
    """
    return 1 << (num_rows - 1).bit_length() if num_rows <= 4 else -(-num_rows // 4) * 4


def _pad_rows(rows: Tensor, num_rows: int) -> Tensor:
    filled = rows.new_empty(num_rows, *rows.shape[1:])
    _copy_padded(filled, rows)
    return filled


def _copy_padded(recorded: Tensor, rows: Tensor) -> None:
    """Copy rows to the start of a recording's input, and repeat the last row to its end."""
    num_rows = len(rows)
    recorded[:num_rows].copy_(rows)
    if num_rows < len(recorded):
        recorded[num_rows:].copy_(rows[-1:].expand(len(recorded) - num_rows, *rows.shape[1:]))
