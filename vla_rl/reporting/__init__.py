"""The output of a run: directory, metrics, live view, videos, summary, memory estimate."""

from vla_rl.reporting.live_view import LiveView, update_line
from vla_rl.reporting.memory import (
    GpuMemory,
    MemoryItem,
    available_bytes,
    gpu_memory,
    memory_table,
    resident_bytes,
)
from vla_rl.reporting.metrics import MetricLog, Sink, read_metrics
from vla_rl.reporting.progress import RunProgress, Snapshot, TaskTally
from vla_rl.reporting.run_directory import RunDirectory
from vla_rl.reporting.sinks import JsonlSink, TensorBoardSink, WandbSink
from vla_rl.reporting.summary import print_summary, summary_tables
from vla_rl.reporting.versions import versions
from vla_rl.reporting.videos import VideoChoice, VideoRecorder, filmed, video_name, write_video

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
    "filmed",
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
