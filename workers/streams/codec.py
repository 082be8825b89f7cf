"""Wire format: a typed message and its tensors <-> a list of byte frames.

    frame 0      msgpack: Header{schema_version, trial_uuid, epoch, request_id, deadline_s, body,
                                 tensors: table of name, dtype, shape, frame, num_frames}
    frame 1..n   the raw bytes of one tensor each, little-endian, C order; of a large one in several frames

Nothing is copied in either direction: encoding hands out views of the arrays, decoding makes read-only views of the
frames, but for a tensor in several frames, which is put together. Nothing is pickled. Whatever a stranger or a bug
sends, decoding either gives a message of exactly the expected types or raises `MalformedMessageError`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from corral.workers.streams.errors import MalformedMessageError

SCHEMA_VERSION = 1
"""Raised when a message changes its meaning; ends of different versions refuse each other instead of guessing."""

Buffer = bytes | memoryview
Tensors = Mapping[str, NDArray[Any]]

_OWN_NAMES = ("int8", "int16", "int32", "int64", "uint8", "bool", "float16", "float32", "float64")
_WIRE_NAME_BY_DTYPE: dict[np.dtype[Any], str] = {
    **{np.dtype(name).newbyteorder("<"): name for name in _OWN_NAMES},
    np.dtype("<u2"): "bfloat16",  # numpy has no bfloat16: its bits travel, and are handed over, as uint16
}
_DTYPE_BY_WIRE_NAME = {name: dtype for dtype, name in _WIRE_NAME_BY_DTYPE.items()}
_MAX_TENSORS = 4096
_MAX_DIMENSIONS = 8
_MAX_LENGTH = 2**40
FRAME_BYTES = 2**28
"""Of a tensor in one frame: less than the largest frame that a bulk socket takes, whatever encryption adds to it."""

_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, KeyError, IndexError, OverflowError, RecursionError)


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of the tensor table."""

    name: Annotated[str, msgspec.Meta(max_length=128)]
    dtype: str
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=_MAX_LENGTH)]], msgspec.Meta(max_length=_MAX_DIMENSIONS)]
    frame: Annotated[int, msgspec.Meta(ge=1, le=_MAX_TENSORS)]
    """The first one, in which it begins."""
    num_frames: Annotated[int, msgspec.Meta(ge=1, le=_MAX_TENSORS)] = 1


BodyT = TypeVar("BodyT")


class Header(msgspec.Struct, Generic[BodyT], frozen=True, forbid_unknown_fields=True, tag="corral"):
    """Frame 0 of every message."""

    schema_version: int
    trial_uuid: str
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    """Trainer epoch of the sender; 0 where no epoch is known yet."""
    request_id: Annotated[str, msgspec.Meta(max_length=64)]
    """The same in a request, in everything re-sent for it, and in its reply; "" in messages that have no reply."""
    deadline_s: Annotated[float, msgspec.Meta(ge=0)]
    """How long the sender of a request waits, from now; 0 if it does not."""
    body: BodyT
    """Read apart from the rest, once its origin is known."""
    tensors: Annotated[list[TensorEntry], msgspec.Meta(max_length=_MAX_TENSORS)]


class MessageBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all bodies: a field that the receiver does not know is an error, not a surprise."""


class Message(msgspec.Struct, Generic[BodyT], frozen=True):
    """What was received."""

    epoch: int
    request_id: str
    deadline_s: float
    body: BodyT
    tensors: dict[str, NDArray[Any]]
    """Read-only views of the received frames, which they keep alive."""


class MessageCodec(Generic[BodyT]):
    """Encodes any body, and decodes bodies of one type (a tagged struct or a union of them), of one trial.

    Example:
        codec: MessageCodec[Ping | Pong] = MessageCodec(Ping | Pong, trial_uuid=trial_uuid)
        frames = codec.encode(Ping(), epoch=3, tensors={"input_ids": np.arange(4)})
        codec.decode(frames).tensors["input_ids"]  # array([0, 1, 2, 3])
    """

    def __init__(self, body_type: Any, *, trial_uuid: str) -> None:
        self._trial_uuid = trial_uuid
        self._encoder = msgspec.msgpack.Encoder()
        self._header_decoder = msgspec.msgpack.Decoder(Header[msgspec.Raw])
        self._body_decoder: msgspec.msgpack.Decoder[BodyT] = msgspec.msgpack.Decoder(body_type)

    def encode(
        self,
        body: msgspec.Struct,
        *,
        epoch: int,
        request_id: str = "",
        deadline_s: float = 0.0,
        tensors: Tensors | None = None,
    ) -> list[Buffer]:
        """Frames to send; they share memory with `tensors`, which must not change until they are sent.

        Guarantee: none is so large that a socket for tensors refuses it, and would refuse it again whenever it is sent.

        Raises:
            ValueError: if a tensor has a dtype that does not travel, or there are more frames than a receiver takes.
        """
        table: list[TensorEntry] = []
        frames: list[Buffer] = []
        for name, array in (tensors or {}).items():
            content, first = _bytes_of(name, array), len(frames) + 1
            frames += [content[at : at + FRAME_BYTES] for at in range(0, max(1, len(content)), FRAME_BYTES)]
            table.append(
                TensorEntry(
                    name=name,
                    dtype=_WIRE_NAME_BY_DTYPE[array.dtype],
                    shape=list(array.shape),
                    frame=first,
                    num_frames=len(frames) - first + 1,
                )
            )
        if len(frames) > _MAX_TENSORS:
            raise ValueError(
                f"a message of {tensors_size_bytes(tensors or {}):,} bytes in {len(frames)} frames cannot be sent: "
                f"a receiver takes {_MAX_TENSORS} frames of {FRAME_BYTES:,} bytes"
            )
        header = Header(
            schema_version=SCHEMA_VERSION,
            trial_uuid=self._trial_uuid,
            epoch=epoch,
            request_id=request_id,
            deadline_s=deadline_s,
            body=body,
            tensors=table,
        )
        return [self._encoder.encode(header), *frames]

    def decode(self, frames: Sequence[Buffer]) -> Message[BodyT]:
        """The message in these frames.

        Raises:
            MalformedMessageError: if they are anything else than a message of this type and trial.
        """
        if not frames:
            raise MalformedMessageError("a message has at least one frame")
        try:
            header = self._header_decoder.decode(frames[0])
            self._check_origin(header)
            tensors = _decode_tensors(header.tensors, frames) if header.tensors or len(frames) > 1 else {}
            return Message(
                epoch=header.epoch,
                request_id=header.request_id,
                deadline_s=header.deadline_s,
                body=self._body_decoder.decode(header.body),
                tensors=tensors,
            )
        except _DECODE_ERRORS as error:
            raise MalformedMessageError(f"{type(error).__name__}: {error}") from error

    def _check_origin(self, header: Header[msgspec.Raw]) -> None:
        if header.schema_version != SCHEMA_VERSION:
            raise MalformedMessageError(
                f"the message has schema version {header.schema_version}, this process speaks {SCHEMA_VERSION}: "
                "all workers of a trial must run the same version of corral"
            )
        if header.trial_uuid != self._trial_uuid:
            raise MalformedMessageError(f"the message belongs to trial {header.trial_uuid[:64]!r}")


def tensors_size_bytes(tensors: Tensors) -> int:
    """Bytes that the tensors take on the wire."""
    return sum(array.nbytes for array in tensors.values())


def _bytes_of(name: str, array: NDArray[Any]) -> memoryview:
    if array.dtype not in _WIRE_NAME_BY_DTYPE:
        raise ValueError(
            f"tensor {name!r} has dtype {array.dtype!r}; streams carry {', '.join(sorted(_DTYPE_BY_WIRE_NAME))} "
            "in native byte order (bfloat16 as its uint16 bits)"
        )
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _decode_tensors(table: list[TensorEntry], frames: Sequence[Buffer]) -> dict[str, NDArray[Any]]:
    named = (number for entry in table for number in range(entry.frame, entry.frame + entry.num_frames))
    # Counted before they are listed: a stranger may name many more than there are.
    if sum(entry.num_frames for entry in table) != len(frames) - 1 or sorted(named) != list(range(1, len(frames))):
        raise MalformedMessageError(f"the tensor table does not name each of the {len(frames) - 1} tensor frames once")
    tensors = {
        entry.name: _decode_tensor(entry, frames[entry.frame : entry.frame + entry.num_frames]) for entry in table
    }
    if len(tensors) != len(table):
        raise MalformedMessageError("two tensors have the same name")
    return tensors


def _decode_tensor(entry: TensorEntry, frames: Sequence[Buffer]) -> NDArray[Any]:
    dtype = _DTYPE_BY_WIRE_NAME.get(entry.dtype)
    if dtype is None:
        raise MalformedMessageError(f"tensor {entry.name!r} has the unknown dtype {entry.dtype[:32]!r}")
    wanted = math.prod(entry.shape) * dtype.itemsize
    if (size := sum(map(len, frames))) != wanted:
        raise MalformedMessageError(
            f"tensor {entry.name!r} of {entry.dtype} {entry.shape} takes {wanted} bytes, its frames have {size}"
        )
    parts = [np.frombuffer(frame, np.uint8) for frame in frames]
    flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if dtype.kind == "b" and flat.size and flat.max() > 1:
        raise MalformedMessageError(f"tensor {entry.name!r} holds bytes that are no bool")
    array = flat.view(dtype).reshape(entry.shape)
    if not array.flags.aligned:
        array = array.copy()  # only small frames share libzmq's receive buffer, at any offset
    array.flags.writeable = False
    return array
