"""Pipelines of coroutine nodes with declared reads and writes.

They are checked when built, overlapped when run, and traced afterwards.

Knows nothing about reinforcement learning, actors or torch.
"""

from vla_rl.errors import GraphError
from vla_rl.graph.executor import Executor, Run, RunningNode
from vla_rl.graph.node import (
    DROP,
    Edge,
    InvalidNode,
    Node,
    NodeFields,
    NodeOutput,
    NodeRole,
    NodeStatus,
    NodeType,
    NotAsync,
    SignatureMismatch,
)
from vla_rl.graph.pipeline import InvalidPipelineFile, Pipeline, load_pipeline
from vla_rl.graph.plan import InvalidRun, Resource, UnknownResource
from vla_rl.graph.task_graph import TaskGraph, UnknownNode
from vla_rl.graph.trace import Slice, TraceWriter, write_trace
from vla_rl.graph.update import (
    CriticalPath,
    Interval,
    NodeFailed,
    Segment,
    Span,
    Update,
    Waited,
    WrongInput,
    WrongOutput,
)
from vla_rl.graph.validation import (
    CyclicGraph,
    DuplicateNode,
    InvalidStream,
    MissingProducer,
    TwoWriters,
    UnknownDependency,
    UnknownFunction,
)

__all__ = [
    "DROP",
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
