"""What goes in comes out unchanged and uncopied; whatever else arrives is refused in one way only."""

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies
from numpy.typing import NDArray

from corral.scheduling.redistribution import Transfer
from corral.workers.requests.messages import (
    ClearDataCache,
    DataTransfer,
    FromWorker,
    MetadataReply,
    OkReply,
    SampleMetadata,
    StatsReply,
    ToWorker,
    TrainStep,
    WorkerRequest,
)
from corral.workers.streams import codec
from corral.workers.streams.codec import Buffer, MessageCodec
from corral.workers.streams.errors import MalformedMessageError
from tests.workers.stream_helpers import TRIAL

DTYPES = ["int8", "int16", "int32", "int64", "uint8", "bool", "float16", "float32", "float64", "uint16"]

REQUEST = WorkerRequest(
    request=TrainStep(
        mfc="actor_train",
        uids=["0:a", "0:b"],
        version=7,
        take=DataTransfer(
            transfers=[Transfer(tag=5, source=0, destinations=(1, 2), uids=("0:a",), keys=("input_ids",))],
            num_tokens={"0:a": [3, 4]},
        ),
    )
)
METADATA = MetadataReply.of(
    [
        SampleMetadata(
            uid="0:a",
            keys=("input_ids",),
            num_tokens=[3, 4],
            order=12,
        )
    ]
)


def worker_codec() -> MessageCodec[ToWorker]:
    return MessageCodec(ToWorker, trial_uuid=TRIAL)


def reply_codec() -> MessageCodec[FromWorker]:
    return MessageCodec(FromWorker, trial_uuid=TRIAL)


def test_messages_come_back_equal() -> None:
    request = worker_codec().decode(worker_codec().encode(REQUEST, epoch=3, request_id="3:9", deadline_s=1.5))
    assert (request.body, request.epoch, request.request_id, request.deadline_s) == (REQUEST, 3, "3:9", 1.5)
    assert reply_codec().decode(reply_codec().encode(METADATA, epoch=3)).body == METADATA


class Crooked(msgspec.Struct, tag="metadata"):
    """Samples as no rank describes them."""

    groups: list[tuple[Any, ...]]


@pytest.mark.parametrize(
    "columns", [(["0:a"], [1, 2], [[3]]), (["0:a", "0:b"], [1], [[3]]), (["0:a"], [1], [[3], [4]]), (["0:a"], [1], [])]
)
def test_samples_whose_columns_have_unequal_lengths_are_refused(columns: tuple[Any, ...]) -> None:
    even = Crooked([(["input_ids"], ["1.4"], "", ["0:a"], [1], [[3]])])
    assert isinstance(reply_codec().decode(reply_codec().encode(even, epoch=3)).body, MetadataReply)
    crooked = reply_codec().encode(Crooked([(["input_ids"], ["1.4"], "", *columns)]), epoch=3)
    with pytest.raises(MalformedMessageError, match="each sample has one uid, order and list of lengths"):
        reply_codec().decode(crooked)


@given(
    st.dictionaries(
        st.text(max_size=20),
        st.sampled_from(DTYPES).flatmap(
            lambda dtype: numpy_strategies.arrays(
                dtype, numpy_strategies.array_shapes(min_dims=0, min_side=0, max_side=4)
            )
        ),
        max_size=4,
    )
)
def test_tensors_come_back_bit_for_bit(tensors: dict[str, NDArray[Any]]) -> None:
    received = reply_codec().decode(reply_codec().encode(OkReply(), epoch=0, tensors=tensors)).tensors
    assert received.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype
        assert received[name].shape == tensor.shape
        assert received[name].tobytes() == tensor.tobytes()


def test_tensors_are_not_copied_in_either_direction() -> None:
    array = np.arange(1000, dtype=np.float32)
    frames = reply_codec().encode(OkReply(), epoch=0, tensors={"rewards": array})
    received = reply_codec().decode(frames).tensors["rewards"]
    assert np.shares_memory(received, array)


def test_received_tensors_are_read_only() -> None:
    frames = reply_codec().encode(OkReply(), epoch=0, tensors={"rewards": np.ones(3)})
    with pytest.raises(ValueError, match="read-only"):
        reply_codec().decode(frames).tensors["rewards"][0] = 2.0


def test_non_contiguous_tensors_travel_in_their_logical_order() -> None:
    array = np.arange(12).reshape(3, 4).T
    frames = reply_codec().encode(OkReply(), epoch=0, tensors={"x": array})
    np.testing.assert_array_equal(reply_codec().decode(frames).tensors["x"], array)


def test_a_large_tensor_travels_in_frames_that_a_socket_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "FRAME_BYTES", 64)
    tensors = {
        "short": np.arange(3),
        "empty": np.zeros(0),
        "even": np.arange(16),
        "odd": np.arange(37, dtype=np.uint8).repeat(5),
    }
    frames = reply_codec().encode(OkReply(), epoch=0, tensors=tensors)
    assert [len(frame) for frame in frames[1:]] == [24, 0, 64, 64, 64, 64, 57]
    received = reply_codec().decode(frames).tensors
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(received[name], tensor)
        assert received[name].dtype == tensor.dtype and not received[name].flags.writeable
    with pytest.raises(ValueError, match="a message of 262,208 bytes in 4097 frames cannot be sent"):
        reply_codec().encode(OkReply(), epoch=0, tensors={"x": np.zeros(64 * 4097, np.uint8)})


def test_bfloat16_travels_as_its_bits() -> None:
    bits = np.array([0x3F80, 0xC000], dtype=np.uint16)
    frames = reply_codec().encode(OkReply(), epoch=0, tensors={"x": bits})
    assert b"bfloat16" in bytes(frames[0])
    np.testing.assert_array_equal(reply_codec().decode(frames).tensors["x"], bits)


@pytest.mark.parametrize(
    "array", [np.array(["text"]), np.array([object()]), np.zeros(2, ">i4"), np.zeros(2, "complex64")]
)
def test_other_dtypes_are_refused_before_they_are_sent(array: NDArray[Any]) -> None:
    with pytest.raises(ValueError, match="'x' has dtype"):
        reply_codec().encode(OkReply(), epoch=0, tensors={"x": array})


def test_a_message_of_another_trial_is_refused() -> None:
    other: MessageCodec[ToWorker] = MessageCodec(ToWorker, trial_uuid="f" * 32)
    with pytest.raises(MalformedMessageError, match="belongs to trial"):
        worker_codec().decode(other.encode(REQUEST, epoch=1))


def header_with(**changes: object) -> bytes:
    """Frame 0 of a ping, with some fields replaced or added."""
    frame = worker_codec().encode(WorkerRequest(request=ClearDataCache(uids=[])), epoch=1, request_id="1:1")[0]
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(frame), **changes})


def entry(**changes: object) -> dict[str, object]:
    return {"name": "x", "dtype": "int8", "shape": [4], "frame": 1, **changes}


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        pytest.param([], "at least one frame", id="no frames"),
        pytest.param([b""], "truncated", id="an empty frame"),
        pytest.param([header_with(schema_version=99)], "schema version 99", id="another version of corral"),
        pytest.param([header_with(epoch=-1)], "epoch", id="a negative epoch"),
        pytest.param([header_with(surprise=1)], "surprise", id="an unknown field"),
        pytest.param([header_with(body={"type": "evil"})], "evil", id="an unknown message"),
        pytest.param([header_with(), b"extra"], "each of the 1 tensor frames", id="a frame without a table row"),
        pytest.param([header_with(tensors=[entry()])], "each of the 0 tensor frames", id="a row without a frame"),
        pytest.param(
            [header_with(tensors=[entry(), entry(name="y")]), b"1234", b"1234"], "once", id="one frame for two tensors"
        ),
        pytest.param(
            [header_with(tensors=[entry(), entry(frame=2)]), b"1234", b"1234"],
            "same name",
            id="two tensors of one name",
        ),
        pytest.param(
            [header_with(tensors=[entry(num_frames=2), entry(name="y", frame=2)]), b"12", b"34", b"1234"],
            "once",
            id="a frame that is of two tensors",
        ),
        pytest.param([header_with(tensors=[entry(num_frames=4096)] * 9), b"1234"], "once", id="more frames than came"),
        pytest.param([header_with(tensors=[entry()]), b"123"], "takes 4 bytes", id="a short frame"),
        pytest.param([header_with(tensors=[entry(shape=[2**40, 2**40])]), b"1234"], "takes", id="an absurd shape"),
        pytest.param([header_with(tensors=[entry(shape=[-4])]), b"1234"], ">= 0", id="a negative length"),
        pytest.param([header_with(tensors=[entry(shape=[1] * 9)]), b"1"], "<= 8", id="too many dimensions"),
        pytest.param([header_with(tensors=[entry(dtype="object")]), b"1234"], "unknown dtype", id="objects"),
        pytest.param([header_with(tensors=[entry(dtype="bool")]), b"\0\1\2\3"], "no bool", id="bytes that are no bool"),
        pytest.param([header_with(body=msgspec.Raw(b"\x91" * 5000 + b"\xc0"))], "RecursionError", id="a nesting bomb"),
    ],
)
def test_malformed_messages_are_refused(frames: list[Buffer], complaint: str) -> None:
    with pytest.raises(MalformedMessageError, match=complaint):
        worker_codec().decode(frames)


def mutate(frames: list[bytes], rng: random.Random) -> list[bytes]:
    """Flip, cut, insert or repeat something."""
    frames = list(frames)
    for _ in range(rng.randint(1, 3)):
        index = rng.randrange(len(frames))
        data = bytearray(frames[index])
        position = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0:
                data[position : position + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[position : position + rng.randint(1, 8)]
            case 2:
                data[position:position] = rng.randbytes(rng.randint(1, 8))
            case 3:
                data = data[:position]
            case 4:
                frames.insert(index, rng.randbytes(rng.randrange(20)))
            case 5:
                data[position : position + 1] = bytes([rng.choice([0xC0, 0xD9, 0xDF, 0xDD, 0xCB, 0xFF, 0x80, 0x90])])
        frames[min(index, len(frames) - 1)] = bytes(data)
    return frames


def test_ten_thousand_mutated_messages_are_refused_or_decoded_and_nothing_else() -> None:
    rng = random.Random(20240607)
    codec = worker_codec()
    tensors = {"input_ids": np.arange(6, dtype=np.int32), "mask": np.array([True, False]), "rewards": np.zeros((2, 3))}
    good = [
        [bytes(frame) for frame in worker_codec().encode(REQUEST, epoch=2, request_id="2:5", tensors=tensors)],
        [
            bytes(frame)
            for frame in worker_codec().encode(
                WorkerRequest(request=ClearDataCache(uids=[])), epoch=2, request_id="2:6"
            )
        ],
    ]
    num_refused = 0
    for index in range(10_000):
        try:
            message = codec.decode(mutate(good[index % 2], rng))
        except MalformedMessageError:
            num_refused += 1
        else:
            assert isinstance(message.body, WorkerRequest)
    assert 5_000 < num_refused < 10_000


def test_statistics_may_be_infinite_or_not_a_number() -> None:
    stats = StatsReply(stats={"loss": float("inf"), "grad_norm": float("nan")})
    received = reply_codec().decode(reply_codec().encode(stats, epoch=0)).body
    assert isinstance(received, StatsReply)
    assert received.stats["loss"] == float("inf") and received.stats["grad_norm"] != received.stats["grad_norm"]
