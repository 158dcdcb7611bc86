"""Weights in shared memory: every byte arrives, nothing else does, and nothing stays behind."""

import os
from multiprocessing.shared_memory import SharedMemory

import pytest
import torch
from processes import named_memory_of
from torch import Tensor

from vla_rl.engines.vllm.staging import MappedWeights, Stage
from vla_rl.errors import CheckpointError


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(7, generator=generator).bfloat16(),
        "c": torch.tensor(seed),
    }


def read(staged: object) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in MappedWeights(staged).tensors()}  # type: ignore[arg-type]


def test_what_is_written_is_what_is_read() -> None:
    stage = Stage(tensors(1))
    staged = stage.write(tensors(2), version=4)
    assert staged.version == 4
    found = read(staged)
    for name, tensor in tensors(2).items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert MappedWeights(staged).checksum() == stage.checksum()


def test_one_version_can_be_read_while_the_next_is_written() -> None:
    stage = Stage(tensors(1))
    mapped = MappedWeights(stage.write(tensors(1), version=1))
    stage.write(tensors(2), version=2)
    assert torch.equal(dict(mapped.tensors())["a"], tensors(1)["a"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("b"), r"1 missing \['b'\]"),
        (lambda weights: weights.update(d=torch.ones(1)), r"1 unknown \['d'\]"),
        (lambda weights: weights.update(a=torch.ones(5, 3)), r"a is torch.float32 \[5, 3\], expected float32 \[3, 5\]"),
        (lambda weights: weights.update(a=torch.ones(3, 5).double()), r"a is torch.float64"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_a_byte_is_written(change: object, message: str) -> None:
    stage = Stage(tensors(1))
    staged = stage.write(tensors(1), version=1)
    wrong = tensors(2)
    change(wrong)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=message):
        stage.write(wrong, version=2)
    assert torch.equal(read(staged)["a"], tensors(1)["a"])


def test_memory_that_is_gone_cannot_be_mapped() -> None:
    stage = Stage(tensors(1))
    staged = stage.write(tensors(1), version=1)
    stage.close()
    with pytest.raises(CheckpointError, match="cannot be opened"):
        MappedWeights(staged)


def test_the_memory_has_no_name_that_could_be_left_behind() -> None:
    named = SharedMemory(create=True, size=64)
    before = named_memory_of([os.getpid()])
    assert f"/dev/shm/{named.name}" in {str(path) for path in before}  # what would be seen
    stage = Stage(tensors(1))
    stage.write(tensors(1), version=1)
    assert named_memory_of([os.getpid()]) <= before
    named.close()
    named.unlink()
    stage.close()
