"""Ways to compute the blocks of a network: compiled, recomputed in the backward pass, or cut over
ranks. None of them changes the names of parameters, so checkpoints stay compatible.

Compiled: torch.compile fuses what surrounds the matrix products, such as norms, rotary positions,
layer scales, residuals.

    a block is called ─► its hooks, as before: recomputation, FSDP2's gathering, traces
                      ─► `forward`: compiled once for each kind of block, mode and sort of shape

One compilation serves all blocks of a stack (regional compilation, as in torchtitan). It is made
anew for a gradient or none, and for one row or several; the number of several rows, and the length
of the trunk's sequence, stay open in it. Copies of a compiled network are compiled. Uncompiled are
calls under a mode that watches or replaces operations (`TorchDispatchMode`: counters of arithmetic,
fake tensors, torch's memory tracker), and calls with a cache of keys and values, which would be
compiled anew for each layer. A block's class is replaced by a subclass, as FSDP2 does, and not its
`__call__`: hooks stay outside, where recomputation and sharding need them, and no block refers to
itself, so that a network is freed with its last name.

Recomputed (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174):
gradients are the same, and an update costs one more forward pass.

    kept for the backward pass   without: all activations of every block
                                 with:    the input of each block, and all activations of one block at a time
"""

import shutil
import subprocess
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from vla_rl.errors import ConfigError
from vla_rl.learner.plan import TensorPlan

Forward: TypeAlias = Callable[..., Tensor]

MOST_COMPILATIONS: Final = 64
"""Compilations of one `forward`. torch's own limit of 8 is below what both towers and all modes
need, and beyond it torch computes uncompiled, with one warning."""

COMPILATION_NOTICE: Final = (
    "blocks are compiled in the first calls of each kind (one row or several, with a gradient or "
    "without), which takes about 10 s on a GPU and minutes on a CPU"
)


class CompiledBlock:
    """Mixin of a block whose `forward` is compiled; `compile_blocks` adds it.

    Attributes:
        compiled_forward: the compiled `forward` of the block's class.
        plain_forward: that `forward` itself.
        has_open_length: whether sequences have many lengths.
    """

    compiled_forward: Forward
    plain_forward: Forward
    has_open_length: bool

    def forward(self, hidden_states: Tensor, *args: Any, **given: Any) -> Tensor:
        """Run the block on hidden states [B, L, D] and the other arguments of its class."""
        kind = type(self)
        if _is_watched() or given.get("past_key_values") is not None:
            return kind.plain_forward(self, hidden_states, *args, **given)
        _raise_limit()
        # a first block's input may be a transposed view, for which it would be compiled again
        hidden_states = hidden_states.contiguous()
        length = hidden_states.shape[1] if self.has_open_length else 0
        for tensor in (hidden_states, *_tensors(given.values())):
            _open(tensor, len(hidden_states), length)
        return kind.compiled_forward(self, hidden_states, *args, **given)


class Uncompiled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside of this mode blocks run uncompiled: for a single call of an unusual shape."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def compile_blocks(
    stack: Iterable[nn.Module], device: torch.device, *, has_open_length: bool
) -> None:
    """Compile the blocks of a stack in place, each at its first call.

    Args:
        stack: blocks that take hidden states [B, L, D].
        device: device on which they will compute.
        has_open_length: whether L changes from call to call.

    Raises: ConfigError if nothing can compile for the device.
    """
    require_compiler(device)
    for block in stack:
        if not isinstance(block, CompiledBlock):
            kind: Any = type(block)
            block.__class__ = _compiled_kind(kind, has_open_length)


def require_compiler(device: torch.device) -> None:
    """Raise ConfigError if torch.compile cannot make kernels for a device: that takes a C++ compiler
    for a CPU, and triton and a C compiler for a GPU.
    """
    remedy = "leave --compile-blocks out, or install"
    if device.type == "cpu":
        # takes a second to import
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except (InvalidCxxCompiler, subprocess.SubprocessError) as error:
            raise ConfigError(
                "compile_blocks is True on a CPU, but no C++ compiler runs here, expected g++ 10 "
                f"or newer; {remedy} one (apt-get install g++, or name it in CXX)"
            ) from error
        return
    from torch.utils._triton import has_triton

    if not has_triton():
        raise ConfigError(
            "compile_blocks is True, but triton is missing or does not support this GPU, expected "
            f"triton and compute capability 7.0 or newer; {remedy} the build of torch for CUDA"
        )
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        raise ConfigError(
            "compile_blocks is True, but there is no C compiler, with which triton starts its "
            f"kernels, expected cc, gcc or clang; {remedy} one (apt-get install gcc)"
        )


@cache
def _compiled_kind(plain: Any, has_open_length: bool) -> type[nn.Module]:
    """Return the compiled subclass of a class of blocks: one for all policies, because compilations
    belong to their class.
    """
    attributes = {
        # static: sizes that differ between towers of one class must not become variables
        "compiled_forward": torch.compile(plain.forward, dynamic=False),
        "plain_forward": plain.forward,
        "has_open_length": has_open_length,
    }
    return type(f"Compiled{plain.__name__}", (CompiledBlock, plain), attributes)


def _is_watched() -> bool:
    return bool(torch._C._len_torch_dispatch_stack())


def _raise_limit() -> None:
    # in each thread: torch's configuration belongs to a context, and the device lane has its own
    config = torch._dynamo.config
    if config.recompile_limit < MOST_COMPILATIONS:
        config.recompile_limit = MOST_COMPILATIONS


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    """Yield the tensors in values and in tuples of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _open(tensor: Tensor, num_rows: int, length: int) -> None:
    """Let a compilation hold for any number of rows, and any length unless that is 0.

    One row stays apart: torch specialises sizes of 1.
    """
    for axis, size in enumerate(tensor.shape):
        if size > 1 and ((axis == 0 and size == num_rows) or size == length):
            torch._dynamo.maybe_mark_dynamic(tensor, axis)


def recompute_in_backward(*stacks: Iterable[nn.Module]) -> None:
    """Recompute each block of each stack in the backward pass. Call it once for each network."""
    for stack in stacks:
        for block in stack:
            checkpoint(block, preserve_rng_state=False)  # nothing here is random


BY_OUTPUTS: Final = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
# The other half of a layer is cut along its inputs, so that its outputs need one sum over the
# ranks.
BY_INPUTS: Final = ("self_attn.o_proj", "mlp.down_proj")
OF_HEADS: Final = ("self_attn.q_norm", "self_attn.k_norm")
"""Norms of queries and keys, which Qwen3 has."""


def decoder_plan(network: nn.Module, layers: str, config: Any) -> TensorPlan:
    """Return the plan of the decoder layers of a network.

    Args:
        network: the whole network.
        layers: name of its list of layers.
        config: transformers' configuration of the trunk.

    An adapter is cut as its layer is: beside outputs its second half, beside inputs its first.
    """
    names = [f"{layers}.{number}" for number in range(config.num_hidden_layers)]
    return TensorPlan(
        by_outputs=_linears(network, names, BY_OUTPUTS, "lora_B"),
        by_inputs=_linears(network, names, BY_INPUTS, "lora_A"),
        of_heads=tuple(
            f"{name}.{norm}"
            for name in names
            for norm in OF_HEADS
            if hasattr(network.get_submodule(name).self_attn, norm.rpartition(".")[2])
        ),
        counts={
            "attention heads": config.num_attention_heads,
            "heads of keys and values": config.num_key_value_heads,
            "numbers in a feed-forward part": config.intermediate_size,
        },
    )


def _linears(
    network: nn.Module, layers: list[str], parts: tuple[str, ...], half: str
) -> tuple[str, ...]:
    found: list[str] = []
    for name in (f"{layer}.{part}" for layer in layers for part in parts):
        linear: Any = network.get_submodule(name)
        if not hasattr(linear, "base_layer"):
            found.append(name)
            continue
        found.append(f"{name}.base_layer")
        found += [f"{name}.{half}.{adapter}" for adapter in getattr(linear, half)]
    return tuple(found)
