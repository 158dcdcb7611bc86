"""State of a run as plain data: tensors of policies by name, other values packed as bytes.

A state is a snapshot, not a view: the next optimizer step does not change it.

`pack` makes msgpack, with arrays as extension types; no pickle. Accepted are the types that msgspec
encodes (structs, dicts, lists, tuples, enums, numbers, strings), with NumPy arrays and numbers anywhere
inside. Arrays come back writable, with their dtype and shape; arrays of objects are rejected.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np
import torch
from torch import Tensor

from vla_rl.errors import CheckpointError
from vla_rl.types import SOLE_MEMBER, AgentNames
from vla_rl.util.arrays import is_plain_dtype, view_as_array


@runtime_checkable
class StagedTensors(Protocol):
    """Tensors of one file, copied where they are computed, in other processes."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        ...

    def write_file(self, path: Path) -> None:
        """Write the safetensors file. Blocks: call it in a thread. Raises: CheckpointError."""
        ...


@dataclass(frozen=True)
class TrainingState:
    """All state that the next update depends on: plain tensors on the CPU, by name, or staged by
    ranks.
    """

    weight_version: int
    policy: "Mapping[str, Tensor] | StagedTensors"
    optimizer: "Mapping[str, Tensor] | StagedTensors"
    rng: Mapping[str, Tensor]
    policy_files: Mapping[str, bytes]
    """Small files that make the policy's tensors a checkpoint of their own, such as its
    `config.json`."""

    folder: Path | None = None
    """Folder of the checkpoint that it was read from, from which ranks read their own parts."""


@dataclass(frozen=True)
class TeamState:
    """The states of all policies that learn in one run."""

    members: Mapping[str, TrainingState]
    """States by member name; at least one, all at one weight version."""

    critic: "Mapping[str, Tensor] | StagedTensors" = field(default_factory=dict)
    """State of the critics, if there are any."""

    critic_file: Path | None = None
    """File that it was read from, from which ranks read their own parts."""

    @classmethod
    def of_one(cls, state: TrainingState) -> "TeamState":
        """Return the state of a team of one, whose policy acts for all agents."""
        return cls({SOLE_MEMBER: state})

    @property
    def only(self) -> TrainingState:
        """State of the only policy. Raises: CheckpointError if there are several."""
        if len(self.members) > 1:
            raise CheckpointError(
                f"the checkpoint has {self.agent_names}, expected one policy; "
                "resume with the recipe and settings that made it."
            )
        return next(iter(self.members.values()))

    @property
    def agent_names(self) -> AgentNames:
        """Names of the members."""
        return AgentNames(self.members)

    @property
    def weight_version(self) -> int:
        """Number of updates, counting for every agent also those in which it did not learn."""
        return min(state.weight_version for state in self.members.values())


def random_state() -> dict[str, Tensor]:
    # NumPy's legacy global generator, because libraries still draw from it
    _, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "torch": torch.get_rng_state().clone(),
        "numpy_keys": torch.from_numpy(np.asarray(keys, dtype=np.uint32).astype(np.int64)),
        "numpy_rest": torch.tensor(
            [float(position), float(has_gauss), float(cached)], dtype=torch.float64
        ),
    }
    for index in range(torch.cuda.device_count()):
        state[f"cuda_{index}"] = torch.cuda.get_rng_state(index).clone()
    return state


def set_random_state(state: Mapping[str, Tensor]) -> None:
    try:
        # float64 holds the position and the cached number exactly; safetensors has no other place
        # for three numbers
        position, has_gauss, cached = state["numpy_rest"].tolist()
        keys = state["numpy_keys"].numpy().astype(np.uint32)
        torch.set_rng_state(state["torch"])
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"the saved random state cannot be restored: {error!r}") from error
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    for index in range(torch.cuda.device_count()):
        if f"cuda_{index}" in state:
            torch.cuda.set_rng_state(state[f"cuda_{index}"], index)


T = TypeVar("T")

ARRAY: Final = 1
"""Extension code of an array: dtype and shape as msgpack, then its bytes in C order."""


class _Header(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]


def pack(value: object) -> bytes:
    """Encode a value. Raises: TypeError naming the type that cannot be packed."""
    return _ENCODER.encode(value)


def unpack(data: bytes, type: type[T]) -> T:
    """Decode bytes as `type`. Raises: ValueError if the bytes do not hold a `type`."""
    try:
        return msgspec.msgpack.decode(
            data, type=type, ext_hook=_decode_extension, dec_hook=_accept_array
        )
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"packed bytes are not a {type}: {error}") from error


def _encode_special(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if not is_plain_dtype(value.dtype):
            raise TypeError(
                f"an array of dtype {value.dtype} cannot be packed; use numbers or "
                "fixed-width strings."
            )
        # dtype and shape travel with the bytes: a buffer that is read back after an upgrade has to
        # be the array that it was
        header = msgspec.msgpack.encode(_Header(value.dtype.str, value.shape))
        return msgspec.msgpack.Ext(
            ARRAY, len(header).to_bytes(2, "little") + header + value.tobytes()
        )
    # rewards and counts come out of NumPy as its own numbers, and JSON or msgpack would refuse the
    # whole buffer for one of them
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(
        f"a {type(value).__name__} cannot be packed; use plain values and NumPy arrays."
    )


def _decode_extension(code: int, data: memoryview) -> np.ndarray:
    if code != ARRAY:
        raise ValueError(f"extension code {code} is unknown, expected {ARRAY}")
    # the array below is a copy: a view would keep the whole file in memory, and could not be
    # written to
    num_header = int.from_bytes(data[:2], "little")
    header = msgspec.msgpack.decode(data[2 : 2 + num_header], type=_Header)
    return view_as_array(data[2 + num_header :], header.dtype, header.shape).copy()


def _accept_array(expected: type[Any], value: Any) -> Any:
    if isinstance(value, expected):
        return value
    raise ValueError(f"found a {type(value).__name__}, expected a {expected.__name__}")


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_encode_special)
