"""The output of a run: directory, metrics, live view, videos, summary, memory estimate."""

from vla_rl.reporting.console import LiveView, print_summary, summary_tables, update_line
from vla_rl.reporting.machine import (
    GpuMemory,
    MemoryItem,
    available_bytes,
    gpu_memory,
    memory_table,
    resident_bytes,
    versions,
)
from vla_rl.reporting.metrics import (
    JsonlSink,
    MetricLog,
    Sink,
    TensorBoardSink,
    WandbSink,
    read_metrics,
)
from vla_rl.reporting.progress import RunProgress, Snapshot, TaskTally
from vla_rl.reporting.run_directory import RunDirectory
from vla_rl.reporting.videos import (
    VideoChoice,
    VideoRecorder,
    encode_video,
    video_name,
    write_video,
)

__all__ = [
    "GpuMemory",
    "JsonlSink",
    "LiveView",
    "MemoryItem",
    "MetricLog",
    "RunDirectory",
    "RunProgress",
    "Sink",
    "Snapshot",
    "TaskTally",
    "TensorBoardSink",
    "VideoChoice",
    "VideoRecorder",
    "WandbSink",
    "available_bytes",
    "encode_video",
    "gpu_memory",
    "memory_table",
    "print_summary",
    "read_metrics",
    "resident_bytes",
    "summary_tables",
    "update_line",
    "versions",
    "video_name",
    "write_video",
]
