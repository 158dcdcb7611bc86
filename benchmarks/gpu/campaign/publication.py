"""Seconds to publish new weights of the 7B, by the way in which an engine holds them.

Keys:
    shared_s    an engine with the learner's own weights: only the version changes
    copied_s    an engine with a copy on the same device
    staged_s    memory that another process opens, through CUDA IPC on a GPU, as vLLM's engines do:
                until that process has read every tensor
    copied_share, staged_share   the same as a share of the time, with an update every 30 s
"""

import subprocess
import sys
from collections.abc import Iterator
from typing import Final

import msgspec

from benchmarks.gpu.campaign.target import Target
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.engines.vllm.staging import Stage, StagedWeights
from vla_rl.learner.estimates.device import GIB
from vla_rl.models.openvla_oft import OpenVlaOft

EVERY_S: Final = 30.0

COPIES: Final = 4
"""The weights, two buffers, and what the reading process holds."""

READER: Final = "benchmarks.gpu.campaign.read_weights"


def measure(target: Target) -> Iterator[tuple[str, object]]:
    """Publish in every way."""
    policy = target.policy(copies=COPIES)
    tensors = policy.checkpoint_tensors()
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    yield "weights_gib", num_bytes / GIB
    yield "shared_s", publisher(target, policy, policy)
    copied = publisher(target, policy, policy.copy())
    yield "copied_s", copied
    yield "copied_share", copied / EVERY_S
    staged = staging(target, policy)
    yield "staged_s", staged
    yield "staged_share", staged / EVERY_S


def publisher(target: Target, learnt: OpenVlaOft, acts: OpenVlaOft) -> float:
    """Return the seconds in which an engine of this process takes weights over."""
    engine = TorchActionEngine(acts, DeviceLane(), EngineConfig(cuda_graphs=False))
    target.seconds_of(lambda: engine.apply_weights(learnt.network, 1))
    return target.seconds_of(lambda: engine.apply_weights(learnt.network, 2))


def staging(target: Target, policy: OpenVlaOft) -> float:
    """Return the seconds until another process has read a version; the second one counts."""
    tensors = policy.checkpoint_tensors()
    stage = Stage(tensors, "gpu" if target.is_gpu else "host")
    with subprocess.Popen(
        [sys.executable, "-m", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None

        def publish(version: int, current: StagedWeights | None) -> StagedWeights:
            assert reader.stdin is not None
            assert reader.stdout is not None
            staged = stage.write_version(tensors, version, current)
            reader.stdin.write(msgspec.msgpack.encode(staged).hex() + "\n")
            reader.stdin.flush()
            if reader.stdout.readline().strip() != str(version):
                raise RuntimeError(f"the reading process ended, with {reader.poll()}")
            return staged

        first = publish(1, None)
        publish(2, first)  # it opens the second buffer
        seconds = target.seconds_of(lambda: publish(3, None))
        reader.stdin.close()
    stage.free_buffers()
    return seconds
