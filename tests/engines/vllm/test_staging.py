"""Weights in shared memory: every byte arrives, nothing else does, and nothing stays behind."""

import os
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory

import msgspec
import pytest
import torch
from processes import named_memory_of
from torch import Tensor

from vla_rl.engines.config import WeightRoute
from vla_rl.engines.vllm.staging import GpuMemory, MappedWeights, Stage, StagedWeights
from vla_rl.errors import CheckpointError, ConfigError


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(7, generator=generator).bfloat16(),
        "c": torch.tensor(seed),
    }


def read(staged: object) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in MappedWeights(staged).named_tensors()}  # type: ignore[arg-type]


def test_what_is_written_is_what_is_read() -> None:
    stage = Stage(tensors(1))
    staged = stage.write_version(tensors(2), version=4)
    assert staged.version == 4
    found = read(staged)
    for name, tensor in tensors(2).items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert MappedWeights(staged).checksum() == stage.checksum()


def test_one_version_can_be_read_while_the_next_is_written() -> None:
    stage = Stage(tensors(1))
    current = stage.write_version(tensors(1), version=1)
    mapped = MappedWeights(current)
    for refused in (2, 3):  # written and not published: an engine that starts still reads version 1
        stage.write_version(tensors(refused), refused, current)
        assert torch.equal(dict(mapped.named_tensors())["a"], tensors(1)["a"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("b"), r"1 missing \['b'\]"),
        (lambda weights: weights.update(d=torch.ones(1)), r"1 unknown \['d'\]"),
        (
            lambda weights: weights.update(a=torch.ones(5, 3)),
            r"a is torch.float32 \[5, 3\], expected float32 \[3, 5\]",
        ),
        (lambda weights: weights.update(a=torch.ones(3, 5).double()), r"a is torch.float64"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_a_byte_is_written(
    change: object, message: str
) -> None:
    stage = Stage(tensors(1))
    staged = stage.write_version(tensors(1), version=1)
    wrong = tensors(2)
    change(wrong)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=message):
        stage.write_version(wrong, version=2)
    assert torch.equal(read(staged)["a"], tensors(1)["a"])


def test_what_engines_are_told_travels_as_plain_bytes() -> None:
    staged = Stage(tensors(1)).write_version(tensors(1), version=3)
    gpu = GpuMemory("GPU-1", 64, b"handle", 64, 0, b"counter", 0, b"event", True)
    for told in (staged, StagedWeights(gpu, 3, staged.offsets)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=StagedWeights) == told


def test_weights_of_a_cpu_cannot_go_through_a_gpu() -> None:
    with pytest.raises(
        ConfigError, match="weights_through is 'gpu', but the learner's weights are on cpu"
    ):
        Stage(tensors(1), route="gpu")


def test_memory_of_a_gpu_that_an_engine_does_not_see_is_refused() -> None:
    staged = StagedWeights(GpuMemory("GPU-0", 64, b"", 64, 0, b"", 0, b"", False), 1, ())
    with pytest.raises(
        CheckpointError, match=r"lie on GPU GPU-0, .* set weights_through to 'host'"
    ):
        MappedWeights(staged)


READER = """
import sys, msgspec
import vla_rl.engines.vllm.engine
from vla_rl.engines.vllm.staging import MappedWeights, StagedWeights
for line in iter(sys.stdin.buffer.readline, b""):
    staged = msgspec.msgpack.decode(bytes.fromhex(line.decode().strip()), type=StagedWeights)
    mapped = MappedWeights(staged)
    print(mapped.checksum(), {tensor.device.type for _, tensor in mapped.named_tensors()}, flush=True)
print("vllm" in sys.modules)
"""


@pytest.mark.parametrize(
    ("device", "route"),
    [
        ("cpu", "auto"),
        pytest.param(
            "cuda",
            "gpu",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_another_process_reads_version_after_version(device: str, route: WeightRoute) -> None:
    stage = Stage({name: tensor.to(device) for name, tensor in tensors(0).items()}, route)
    with subprocess.Popen(
        [sys.executable, "-c", READER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        for version in range(1, 4):
            written = {name: tensor.to(device) for name, tensor in tensors(version).items()}
            staged = stage.write_version(written, version)
            reader.stdin.write(msgspec.msgpack.encode(staged).hex() + "\n")
            assert reader.stdout.readline() == f"{stage.checksum()} {{'{device}'}}\n"
        reader.stdin.close()
        assert reader.stdout.readline() == "False\n"  # engines are imported without vLLM itself
    stage.free_buffers()


def test_memory_that_is_gone_cannot_be_mapped() -> None:
    stage = Stage(tensors(1))
    staged = stage.write_version(tensors(1), version=1)
    stage.free_buffers()
    with pytest.raises(CheckpointError, match="cannot be opened"):
        MappedWeights(staged)


def test_the_memory_has_no_name_that_could_be_left_behind() -> None:
    named = SharedMemory(create=True, size=64)
    before = named_memory_of([os.getpid()])
    assert f"/dev/shm/{named.name}" in {str(path) for path in before}  # what would be seen
    stage = Stage(tensors(1))
    stage.write_version(tensors(1), version=1)
    assert named_memory_of([os.getpid()]) <= before
    named.close()
    named.unlink()
    stage.free_buffers()
