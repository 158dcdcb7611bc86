"""Encode values to frames and decode them: msgspec by type, arrays outside the payload.

An array becomes a msgpack extension that says where its bytes are:

    inline     in the extension itself        below 4 KiB, where a frame of its own costs more than the copy
    slot       in a shared-memory slot        from 16 KiB on, on the same host, while slots are free
    frame      in a frame of its own          everywhere else; cut into parts if it is large

A handle of an actor becomes an extension with its address and the keys of its holder.

NumPy scalars become Python numbers. A class of another library travels if `register_extension` was told
how, as tensors do between learner and ranks. Any other type unknown to msgspec is rejected with a
TypeError; pickle is never used. A codec belongs to one connection and one loop; encoding and decoding never
suspend, so its state needs no lock.
"""

import math
import pkgutil
import struct
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np

from vla_rl.actors.wire.envelope import (
    ENVELOPE,
    ENVELOPE_SIZE,
    MAGIC,
    MAX_FRAMES,
    MAX_MESSAGE_BYTES,
    PART_BYTES,
    ActorReference,
    Frames,
    HasReference,
    MalformedMessage,
    join_frames,
    num_parts,
    split_frames,
)
from vla_rl.actors.wire.extensions import EXTENDED, FIRST_EXTENSION, restore_value
from vla_rl.actors.wire.slots import PlainBlock, SharedBlock, SlotArray, SlotReader, SlotWriter
from vla_rl.util.arrays import MOST_AXES, is_plain_dtype, parse_dtype

INLINE_BELOW = 4096
SLOT_FROM = 16384
_SINGLE_FRAME_BELOW = PART_BYTES - ENVELOPE_SIZE
_INLINE, _FRAME, _SLOT, _ACTOR = 1, 2, 3, 4
_ARRAYS = (_INLINE, _FRAME, _SLOT)
_MOST_KNOWN_SLOTS = 1024
_MAKE_HANDLE: Final = "vla_rl.actors.remote.shared_handles:make_shared_handle"
_META = struct.Struct("<HBB")
_FRAME_REF = struct.Struct("<I")
_SLOT_REF = struct.Struct("<IQ")
_NOT_A_MESSAGE = (msgspec.DecodeError, ValueError, OverflowError, RecursionError, TypeError)


class Codec:
    """Encodes and decodes the messages of one connection.

    Args:
        slots_out, slots_in: ends of the two arenas shared with the peer; None if there is no shared
            memory.
    """

    def __init__(
        self, slots_out: SlotWriter | None = None, slots_in: SlotReader | None = None
    ) -> None:
        self._slots_out, self._slots_in = slots_out, slots_in
        self.peer_host = ""
        """Address of the peer's machine, if that is another one: where actors are which it has beside it."""
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_special)
        self._decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
        self._frames_out: list[Any] = []
        self._slots_taken: list[int] = []
        self._frames_in: Frames = ()
        self._views: dict[int, np.ndarray] = {}
        self._known_slots: dict[bytes, SlotArray] = {}
        self._any = self.get_decoder(Any)

    @property
    def num_slots_taken(self) -> int:
        """Number of our slots that the peer still reads."""
        return self._slots_out.num_taken if self._slots_out else 0

    def get_decoder(self, type_: Any) -> msgspec.msgpack.Decoder[Any]:
        """Return the decoder for one annotation, made once.

        Raises: TypeError for a type that cannot be sent.
        """
        decoder = self._decoders.get(type_)
        if decoder is None:
            decoder = msgspec.msgpack.Decoder(
                type_, ext_hook=self._decode_special, dec_hook=_check_class
            )
            # msgspec compiles a decoder for its type; no call has to wait for that but the first.
            self._decoders[type_] = decoder
        return decoder

    def encode(
        self, kind: int, method: int, actor: int, call: int, value: Any, label: str
    ) -> list[Any]:
        """Return the frames of one message.

        Raises: TypeError naming `label` if a part of `value` cannot be sent.
        """
        try:
            payload = self._encoder.encode(value)
        except Exception as error:  # includes errors from a property or an unset field of the value
            self._undo_encoding()
            raise TypeError(f"{label}: {error}") from None
        if len(payload) > MAX_MESSAGE_BYTES:
            self._undo_encoding()
            raise TypeError(f"{label}: {_describe_excess(len(payload))}")
        # The way of nearly every call: no frame but this one, so no list of sizes is made.
        if not self._frames_out and len(payload) < _SINGLE_FRAME_BELOW:
            if self._slots_taken:
                self._slots_taken.clear()
            return [ENVELOPE.pack(MAGIC, kind, method, 0, actor, call) + payload]
        sizes = (ENVELOPE_SIZE + len(payload), *(len(frame) for frame in self._frames_out))
        num_frames = sum(map(num_parts, sizes))
        if num_frames > MAX_FRAMES:
            self._undo_encoding()
            raise TypeError(
                f"{label}: {num_frames} frames of arrays in one message, expected at most "
                f"{MAX_FRAMES}; stack small arrays, or send several messages."
            )
        head = ENVELOPE.pack(MAGIC, kind, method, num_frames - 1, actor, call) + payload
        frames, self._frames_out = split_frames((head, *self._frames_out)), []
        self._slots_taken.clear()
        return frames

    def decode(self, decoder: msgspec.msgpack.Decoder[Any], frames: Frames) -> Any:
        """Return the value of a message.

        Raises: msgspec.ValidationError for another type, MalformedMessage for other bytes.

        The slots of a rejected message are given back.
        """
        if len(frames) > 1:
            frames = join_frames(frames)
        self._frames_in = frames
        payload = memoryview(frames[0])[ENVELOPE_SIZE:]
        try:
            return decoder.decode(payload)
        except msgspec.ValidationError:
            self._give_back(payload)
            raise
        except _NOT_A_MESSAGE as error:
            self._give_back(payload)
            raise MalformedMessage(str(error)) from None
        except Exception as error:  # of a type's own checks; no call may stay without its answer
            self._give_back(payload)
            raise MalformedMessage(f"{type(error).__name__}: {error}") from error
        # The frames of an error would live as long as the connection.
        finally:
            self._frames_in = ()
            if self._views:
                self._views = {}

    def discard(self, frames: Frames) -> None:
        """Give back the slots of a message that will not be read. Raises: MalformedMessage."""
        try:
            self.decode(self._any, frames)
        except msgspec.ValidationError as error:  # e.g. an invalid timestamp
            raise MalformedMessage(str(error)) from None

    def _give_back(self, payload: memoryview) -> None:
        """Give back the slots of arrays that a failed decoding did not reach.

        The others are released with their leases.
        """
        if self._slots_in is None:
            return
        try:
            self._any.decode(payload)
        except _NOT_A_MESSAGE:
            return  # only a broken process can write such bytes

    def _undo_encoding(self) -> None:
        if self._slots_out is not None:
            for slot in self._slots_taken:
                self._slots_out.give_back(slot)
        self._slots_taken.clear()
        self._frames_out = []

    def _encode_special(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._encode_array(value)
        if isinstance(value, SharedBlock):
            self._slots_taken.append(value.slot)
            return _refer_to_block(value)
        if isinstance(value, PlainBlock):
            return self._encode_array(value.array)
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, HasReference):
            return msgspec.msgpack.Ext(_ACTOR, msgspec.msgpack.encode(value.__reference__()))
        kind = type(value)
        if kind in EXTENDED:
            code, to_plain = EXTENDED[kind]
            return msgspec.msgpack.Ext(code, self._encoder.encode(to_plain(value)))
        raise TypeError(
            f"a value of type {kind.__module__}.{kind.__qualname__} cannot be sent; expected plain "
            "values, msgspec structs, dataclasses, enums and NumPy arrays. Convert it, or declare "
            "a msgspec.Struct for it."
        )

    def _encode_array(self, array: np.ndarray) -> msgspec.msgpack.Ext:
        meta, num_bytes = _describe_array(array.dtype, array.shape)
        if num_bytes < INLINE_BELOW:
            return msgspec.msgpack.Ext(_INLINE, meta + array.tobytes())
        # two camera images of 0.3 MB: read in place 8,000 steps/s, in copied frames 3,350, and in
        # frames that ZeroMQ does not copy 2,340
        if num_bytes >= SLOT_FROM and self._slots_out is not None:
            slot = self._slots_out.write_array(array)
            if slot is not None:
                self._slots_taken.append(slot[0])
                return msgspec.msgpack.Ext(_SLOT, meta + _SLOT_REF.pack(*slot))
        if num_bytes > MAX_MESSAGE_BYTES:
            raise ValueError(_describe_excess(num_bytes))
        self._frames_out.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return msgspec.msgpack.Ext(_FRAME, meta + _FRAME_REF.pack(len(self._frames_out)))

    def _decode_special(self, code: int, data: memoryview) -> Any:
        if code in _ARRAYS:
            return self._decode_array(code, data)
        if code == _ACTOR:
            reference = msgspec.msgpack.decode(data, type=ActorReference)
            if reference.host or not self.peer_host:
                return reference
            return msgspec.structs.replace(reference, host=self.peer_host)
        # its arrays first: slots of an extension that this process does not know are given back too
        return restore_value(code, self._any.decode(data))

    def _decode_array(self, code: int, data: memoryview) -> np.ndarray:
        if code == _SLOT and (known := self._known_slots.get(bytes(data))) is not None:
            # One lease for a slot in a message: an array named twice must not be given back twice.
            view = self._views.get(known.slot)
            if view is None:
                view = self._views[known.slot] = known.lease_array()
            return view
        if len(data) < _META.size:
            raise MalformedMessage("array without a description.")
        end = data[0] | data[1] << 8
        dtype, shape, num_bytes = _parse_meta(bytes(data[:end]))
        if code == _SLOT:
            self._learn_slot(data, end, dtype, shape, num_bytes)
            return self._decode_array(code, data)
        if code == _INLINE:
            raw: Any = bytes(data[end:])
        elif code == _FRAME:
            raw = self._frame(data[end:])
        else:
            raise MalformedMessage(f"extension {code} is unknown.")
        if len(raw) != num_bytes:
            raise MalformedMessage(
                f"array of shape {shape} and dtype {dtype} came with {len(raw)} bytes."
            )
        return np.ndarray(shape, dtype, raw)

    def _frame(self, rest: memoryview) -> Any:
        if len(rest) != _FRAME_REF.size:
            raise MalformedMessage("array without the number of its frame.")
        (number,) = _FRAME_REF.unpack(rest)
        if not 1 <= number < len(self._frames_in):
            raise MalformedMessage(
                f"array in frame {number} of a message with {len(self._frames_in)} frames."
            )
        return self._frames_in[number]

    def _learn_slot(
        self,
        data: memoryview,
        end: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        num_bytes: int,
    ) -> None:
        """Cache the array for these bytes: the same few references come again and again."""
        if self._slots_in is None or len(data) - end != _SLOT_REF.size:
            raise MalformedMessage("array in a slot, on a link without shared memory.")
        slot, offset = _SLOT_REF.unpack(data[end:])
        array = self._slots_in.find_array(slot, offset, dtype, shape, num_bytes)
        # A peer may name any number of them; forgetting all costs one description each.
        if len(self._known_slots) == _MOST_KNOWN_SLOTS:
            self._known_slots.clear()
        self._known_slots[bytes(data)] = array


def count_described_bytes(payload: Any) -> int:
    """Return the size of all frames that a payload describes. Raises: MalformedMessage."""
    sizes: dict[int, int] = {}

    def note(code: int, data: memoryview) -> None:
        if code >= FIRST_EXTENSION:
            msgspec.msgpack.decode(data, ext_hook=note)
        elif code == _FRAME and len(data) >= _META.size:
            end = data[0] | data[1] << 8
            _, _, num_bytes = _parse_meta(bytes(data[:end]))
            if len(data) - end != _FRAME_REF.size or num_bytes > MAX_MESSAGE_BYTES:
                raise MalformedMessage("array without the number of its frame, or too large.")
            sizes[_FRAME_REF.unpack(data[end:])[0]] = num_bytes

    try:
        msgspec.msgpack.decode(payload, ext_hook=note)
    except _NOT_A_MESSAGE as error:
        raise MalformedMessage(str(error)) from None
    return sum(sizes.values())


@lru_cache(maxsize=1024)
def _refer_to_block(block: SharedBlock) -> msgspec.msgpack.Ext:
    """Return the reference to a block, the same each time."""
    meta, _ = _describe_array(block.array.dtype, block.array.shape)
    return msgspec.msgpack.Ext(_SLOT, meta + _SLOT_REF.pack(block.slot, block.offset))


@lru_cache(maxsize=1024)
def _describe_array(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[bytes, int]:
    """Return the description and the size in bytes of such arrays.

    Raises: TypeError for a dtype that is not plain numbers.

    The description is `its length u16, ndim u8, length of dtype u8, dtype, shape as u64 each`.
    """
    name = dtype.str.encode()
    if not is_plain_dtype(dtype):
        raise TypeError(
            f"an array of dtype {dtype} cannot be sent; expected numbers, booleans, fixed-width "
            "text or datetimes."
        )
    if len(shape) > MOST_AXES:
        raise ValueError(
            f"an array of {len(shape)} axes cannot be sent, expected at most {MOST_AXES}."
        )
    # NumPy refuses such a shape although it has no bytes: the receiver could not make it.
    if _is_empty_but_long(shape):
        raise ValueError(
            f"an empty array of shape {shape} cannot be sent; expected axes of at most "
            f"{MAX_MESSAGE_BYTES}."
        )
    length = _META.size + len(name) + 8 * len(shape)
    meta = _META.pack(length, len(shape), len(name)) + name + struct.pack(f"<{len(shape)}Q", *shape)
    return meta, math.prod(shape) * dtype.itemsize


def _is_empty_but_long(shape: tuple[int, ...]) -> bool:
    """Return whether an array without bytes has an axis too long for any receiver."""
    return 0 in shape and max(shape) > MAX_MESSAGE_BYTES


def _describe_excess(num_bytes: int) -> str:
    return (
        f"{num_bytes} bytes at once, expected at most {MAX_MESSAGE_BYTES}; send it in parts, "
        "e.g. as a stream."
    )


@lru_cache(maxsize=1024)
def _parse_meta(meta: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Read what `_describe_array` wrote: dtype, shape, size in bytes. Raises: MalformedMessage."""
    if len(meta) < _META.size:
        raise MalformedMessage("array without a description.")
    length, ndim, name_size = _META.unpack_from(meta)
    if not len(meta) == length == _META.size + name_size + 8 * ndim or ndim > MOST_AXES:
        raise MalformedMessage("array with an incomplete description.")
    try:
        dtype = parse_dtype(meta[_META.size : _META.size + name_size].decode("ascii"))
    except ValueError as error:
        raise MalformedMessage(f"array of an unknown type: {error}") from None
    shape = struct.unpack_from(f"<{ndim}Q", meta, _META.size + name_size)
    if _is_empty_but_long(shape):
        raise MalformedMessage(
            f"array of shape {shape}, which is empty and has an axis longer than any array may "
            "have."
        )
    return dtype, shape, math.prod(shape) * dtype.itemsize


def _check_class(type_: Any, value: Any) -> Any:
    """Check an object of a class unknown to msgspec: only instances, arrays and handles pass."""
    if type(value) is type_:
        return value
    wanted = getattr(type_, "__origin__", type_)
    if isinstance(wanted, type) and isinstance(value, wanted):
        return value
    if isinstance(value, ActorReference):
        # imported with the first handle: each simulator process has a codec, and none is sent a handle
        make_handle = pkgutil.resolve_name(_MAKE_HANDLE)
        return make_handle(wanted, value)
    raise ValueError(
        f"Expected `{getattr(wanted, '__name__', wanted)}`, got `{type(value).__name__}`"
    )
