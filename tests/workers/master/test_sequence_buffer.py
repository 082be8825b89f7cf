"""The buffer knows which samples are here, what exists for them, and where."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from corral.workers.master.sample_source import BufferedSample, Places, SequenceBuffer, note_held


def row(uid: str, *, order: int, owner: int = 0) -> BufferedSample:
    return BufferedSample(
        uid=uid, order=order, owner=owner, num_tokens=[4], versions=frozenset(), keys=frozenset({"input_ids"})
    )


def places(buffer: SequenceBuffer) -> dict[str, Places]:
    return {uid: sample.places for uid, sample in buffer.samples.items()}


def test_outputs_and_transfers_add_places_and_a_release_forgets_them_all() -> None:
    buffer = SequenceBuffer(is_consumed=lambda uid: False)
    buffer.put(row("0:a", order=0, owner=1))
    note_held(buffer.find(["0:a"]), ["proximal_logprobs"], [0])
    note_held(buffer.find(["0:a"]), ["input_ids"], [0, 2])
    assert places(buffer) == {"0:a": {"input_ids": {0, 1, 2}, "proximal_logprobs": {0}}}
    assert buffer.release(["0:a", "0:unknown"]) == {0: ["0:a"], 1: ["0:a"], 2: ["0:a"]}
    assert not buffer.samples


def test_a_release_names_each_rank_with_its_own_samples_second_copies_among_them() -> None:
    buffer = SequenceBuffer(is_consumed=lambda uid: False)
    for uid, owner in (("0:a", 0), ("0:b", 1), ("0:c", 1)):
        buffer.put(row(uid, order=0, owner=owner))
    assert not buffer.put(row("0:a", order=0, owner=2))
    assert places(buffer)["0:a"] == {"input_ids": {0}}  # nothing is computed on a second copy
    assert buffer.release(["0:a", "0:b"]) == {0: ["0:a"], 1: ["0:b"], 2: ["0:a"]}
    assert buffer.release(["0:a", "0:c"]) == {1: ["0:c"]}


def test_what_is_consumed_is_turned_away() -> None:
    buffer = SequenceBuffer(is_consumed={"0:a"}.__contains__)
    assert not buffer.put(row("0:a", order=0))
    assert buffer.put(row("0:b", order=1)) and not buffer.put(row("0:b", order=1))
    assert buffer.duplicates == 2


ranks = st.integers(0, 3)
uids = st.sampled_from(["0:a", "0:b", "0:c", "0:d"])
events = st.one_of(
    st.tuples(st.just("put"), uids, ranks),
    st.tuples(st.just("amend"), uids, ranks),
    st.tuples(st.just("move"), uids, ranks),
    st.tuples(st.just("release"), st.lists(uids), st.just(0)),
)


@given(st.lists(events, max_size=40))
def test_whatever_happens_every_rank_that_holds_something_is_told_to_forget_it(
    happened: list[tuple[str, str | list[str], int]],
) -> None:
    """Beside a list of (rank, uid, key) of everything that lies anywhere."""
    buffer = SequenceBuffer(is_consumed=lambda uid: False)
    lies: list[tuple[int, str, str]] = []
    arrived: set[str] = set()
    for event, subject, rank in happened:
        if isinstance(subject, list):
            expected: defaultdict[int, set[str]] = defaultdict(set)
            for where, uid, _ in lies:
                if uid in subject:
                    expected[where].add(uid)
            told = buffer.release(subject)
            assert {where: set(found) for where, found in told.items()} == expected
            assert all(len(set(found)) == len(found) for found in told.values())
            lies = [place for place in lies if place[1] not in subject]
            arrived -= set(subject)
        elif event == "put":
            assert buffer.put(row(subject, order=0, owner=rank)) == (subject not in arrived)
            lies.append((rank, subject, "a copy" if subject in arrived else "input_ids"))
            arrived.add(subject)
        elif subject in arrived and event == "amend":
            note_held(buffer.find([subject]), ["values"], [rank])
            lies.append((rank, subject, "values"))
        elif subject in arrived:
            note_held(buffer.find([subject]), ["input_ids"], [rank])
            lies.append((rank, subject, "input_ids"))
        found = {(where, uid, key) for uid, keys in places(buffer).items() for key in keys for where in keys[key]}
        assert found == {place for place in lies if place[2] != "a copy"}
        assert set(buffer.samples) == arrived
