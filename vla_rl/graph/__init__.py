"""Pipelines of coroutine nodes with declared reads and writes.

They are checked when built, overlapped when run, and traced afterwards.

Knows nothing about reinforcement learning, actors or torch.
"""

from vla_rl.errors import GraphError
from vla_rl.graph.appended_file import AppendedFile
from vla_rl.graph.errors import (
    CyclicGraph,
    DuplicateNode,
    InvalidNode,
    InvalidPipelineFile,
    InvalidRun,
    InvalidStream,
    MissingProducer,
    NotAsync,
    SignatureMismatch,
    TwoWriters,
    UnknownDependency,
    UnknownFunction,
    UnknownNode,
    UnknownResource,
)
from vla_rl.graph.executor import Executor, Run, RunningNode
from vla_rl.graph.failures import NodeFailed, WrongInput, WrongOutput
from vla_rl.graph.node import (
    DROP,
    Edge,
    Node,
    NodeFields,
    NodeOutput,
    NodeRole,
    NodeStatus,
    NodeType,
)
from vla_rl.graph.pipeline import Pipeline, load_pipeline
from vla_rl.graph.resources import Resource
from vla_rl.graph.spans import CriticalPath, Interval, Segment, Span, Waited
from vla_rl.graph.task_graph import TaskGraph
from vla_rl.graph.trace import Slice, TraceWriter, write_trace
from vla_rl.graph.update import Update

__all__ = [
    "DROP",
    "AppendedFile",
    "CriticalPath",
    "CyclicGraph",
    "DuplicateNode",
    "Edge",
    "Executor",
    "GraphError",
    "Interval",
    "InvalidNode",
    "InvalidPipelineFile",
    "InvalidRun",
    "InvalidStream",
    "MissingProducer",
    "Node",
    "NodeFailed",
    "NodeFields",
    "NodeOutput",
    "NodeRole",
    "NodeStatus",
    "NodeType",
    "NotAsync",
    "Pipeline",
    "Resource",
    "Run",
    "RunningNode",
    "Segment",
    "SignatureMismatch",
    "Slice",
    "Span",
    "TaskGraph",
    "TraceWriter",
    "TwoWriters",
    "UnknownDependency",
    "UnknownFunction",
    "UnknownNode",
    "UnknownResource",
    "Update",
    "Waited",
    "WrongInput",
    "WrongOutput",
    "load_pipeline",
    "write_trace",
]
