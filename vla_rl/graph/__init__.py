"""Pipelines of coroutine nodes with declared reads and writes.

They are checked when built, overlapped when run, and traced afterwards.

Knows nothing about reinforcement learning, actors or torch.
"""

from vla_rl.errors import GraphError as GraphError
from vla_rl.graph.executor import Executor as Executor
from vla_rl.graph.node import (
    DROP as DROP,
    InvalidNode as InvalidNode,
    Node as Node,
    NodeFields as NodeFields,
    NodeOutput as NodeOutput,
    NodeRole as NodeRole,
    NodeStatus as NodeStatus,
    NodeType as NodeType,
    NotAsync as NotAsync,
    SignatureMismatch as SignatureMismatch,
)
from vla_rl.graph.pipeline import (
    InvalidPipelineFile as InvalidPipelineFile,
    Pipeline as Pipeline,
    load_pipeline as load_pipeline,
)
from vla_rl.graph.plan import (
    InvalidRun as InvalidRun,
    Resource as Resource,
    UnknownResource as UnknownResource,
)
from vla_rl.graph.task_graph import TaskGraph as TaskGraph, UnknownNode as UnknownNode
from vla_rl.graph.trace import (
    Slice as Slice,
    TraceWriter as TraceWriter,
    write_trace as write_trace,
)
from vla_rl.graph.update import (
    Interval as Interval,
    NodeFailed as NodeFailed,
    Update as Update,
    Waited as Waited,
    WrongInput as WrongInput,
    WrongOutput as WrongOutput,
)
from vla_rl.graph.validation import (
    CyclicGraph as CyclicGraph,
    DuplicateNode as DuplicateNode,
    InvalidStream as InvalidStream,
    MissingProducer as MissingProducer,
    TwoWriters as TwoWriters,
    UnknownDependency as UnknownDependency,
    UnknownFunction as UnknownFunction,
)
