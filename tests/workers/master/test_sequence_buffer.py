"""The buffer knows which samples are here, what exists for them, and where."""

from corral.workers.master.sequence_buffer import BufferedSample, SequenceBuffer


def row(uid: str, *, order: int, owner: int = 0) -> BufferedSample:
    return BufferedSample(
        uid=uid, order=order, owner=owner, num_tokens=[4], versions=frozenset(), keys=frozenset({"input_ids"})
    )


def test_ready_samples_have_all_keys_and_come_oldest_first() -> None:
    buffer = SequenceBuffer(is_consumed=lambda uid: False)
    for uid, order in (("0:c", 3), ("0:a", 1), ("0:b", 2)):
        assert buffer.put(row(uid, order=order))
    assert [sample.uid for sample in buffer.ready(["input_ids"])] == ["0:a", "0:b", "0:c"]
    assert buffer.ready(["input_ids", "rewards"]) == []


def test_outputs_and_transfers_add_places_and_a_release_forgets_them_all() -> None:
    buffer = SequenceBuffer(is_consumed=lambda uid: False)
    buffer.put(row("0:a", order=0, owner=1))
    buffer.amend(["proximal_logprobs"], {"0:a": 0})
    buffer.moved("0:a", "input_ids", [0, 2])
    assert buffer.located == {("0:a", "input_ids"): {0, 1, 2}, ("0:a", "proximal_logprobs"): {0}}
    assert buffer.release(["0:a", "0:unknown"]) == {0: ["0:a"], 1: ["0:a"], 2: ["0:a"]}
    assert not buffer.samples and not buffer.located and not buffer.holders


def test_a_release_names_each_rank_with_its_own_samples_second_copies_among_them() -> None:
    buffer = SequenceBuffer(is_consumed=lambda uid: False)
    for uid, owner in (("0:a", 0), ("0:b", 1), ("0:c", 1)):
        buffer.put(row(uid, order=0, owner=owner))
    assert not buffer.put(row("0:a", order=0, owner=2))
    assert buffer.located["0:a", "input_ids"] == {0}  # nothing is computed on a second copy
    assert buffer.release(["0:a", "0:b"]) == {0: ["0:a"], 1: ["0:b"], 2: ["0:a"]}
    assert buffer.release(["0:a", "0:c"]) == {1: ["0:c"]}


def test_what_is_consumed_is_turned_away() -> None:
    buffer = SequenceBuffer(is_consumed={"0:a"}.__contains__)
    assert not buffer.put(row("0:a", order=0))
    assert buffer.put(row("0:b", order=1)) and not buffer.put(row("0:b", order=1))
    assert buffer.duplicates == 2
