"""The process that reads what the stage `publication` publishes, as an engine of vLLM does."""

import sys

import msgspec
import torch

from vla_rl.engines.vllm.staging import MappedWeights, StagedWeights


def read_versions() -> None:
    """Read every version that standard input names, into tensors of this process."""
    own: dict[str, torch.Tensor] = {}
    for line in sys.stdin:
        staged = msgspec.msgpack.decode(bytes.fromhex(line.strip()), type=StagedWeights)
        mapped = MappedWeights(staged)
        for name, tensor in mapped.named_tensors():
            own.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(mapped.version, flush=True)


if __name__ == "__main__":
    read_versions()
