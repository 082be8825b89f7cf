"""Batches are made of what is fresh, whole and new; everything else goes back, with the right verdict."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from corral.scheduling.policy_version import Lineage, PolicyVersion
from corral.scheduling.staleness import BatchDecision, ReadySamples, ReorderWindow, StaleTokenError
from corral.workers.master.sample_source import (
    BufferedSample,
    DatasetSource,
    Drops,
    RanksByKey,
    SequenceBuffer,
    TrajectorySource,
    note_held,
)
from corral.workers.requests.messages import Rejection

KEYS = frozenset({"input_ids"})


def sample(uid: str, *, order: int = 0, version: str = "1.0", dropped: str = "", owner: int = 0) -> BufferedSample:
    return BufferedSample(
        uid=uid,
        order=order,
        owner=owner,
        num_tokens=[3],
        versions=frozenset() if dropped else frozenset({PolicyVersion.parse(version)}),
        keys=frozenset() if dropped else KEYS,
        dropped_because=dropped,
    )


def unexpected(uid: str, reason: str) -> None:
    pytest.fail(f"{uid} is dropped: {reason}")


class Holders:
    """Model workers that hand over what the test puts into `arrivals`."""

    def __init__(self) -> None:
        self.arrivals: list[BufferedSample] = []
        self.rejected: list[tuple[str, Rejection]] = []
        self.told: list[tuple[dict[int, list[str]], Rejection]] = []
        self.cleared: list[str] = []

    async def fetch(self) -> list[BufferedSample]:
        arrived, self.arrivals = self.arrivals, []
        return arrived

    async def load_rows(self, uids: Sequence[str]) -> list[BufferedSample]:
        return [sample(uid) for uid in uids]

    def clear(self, uids_by_rank: Mapping[int, list[str]]) -> None:
        self.cleared += [uid for uids in uids_by_rank.values() for uid in uids]

    async def reject(self, uids_by_rank: Mapping[int, Sequence[str]], rejection: Rejection) -> None:
        self.told.append(({rank: list(uids) for rank, uids in uids_by_rank.items()}, rejection))
        self.rejected += [(uid, rejection) for uids in uids_by_rank.values() for uid in uids]


def source_of(
    holders: Holders,
    *,
    consumed: set[str],
    batch_size: int = 2,
    eta: int = 1,
    epoch: int = 1,
    window: ReorderWindow | None = None,
) -> tuple[TrajectorySource, SequenceBuffer, dict[str, str]]:
    buffer = SequenceBuffer(is_consumed=consumed.__contains__)
    dropped: dict[str, str] = {}
    commits = [PolicyVersion(1, 2)] if epoch > 1 else []
    lineage = Lineage(commits, epoch=epoch)
    source = TrajectorySource(
        buffer,
        holders,
        lineage,
        window,
        input_keys=KEYS,
        batch_size=batch_size,
        eta=eta,
        producers=["rollout_worker/0"],
        on_drop=dropped.__setitem__,
        is_dropped=dropped.__contains__,
    )
    return source, buffer, dropped


def test_a_batch_is_the_oldest_samples_and_waits_until_it_is_whole() -> None:
    holders = Holders()
    source, _, _ = source_of(holders, consumed=set())
    holders.arrivals = [sample("0:b", order=1, version="0.0")]
    assert asyncio.run(source.poll(version=0, remaining=9)) is None
    assert source.waiting_for().startswith("1 more of 2")
    holders.arrivals = [sample("0:c", order=2, version="0.0"), sample("0:a", order=0, version="0.0")]
    assert asyncio.run(source.poll(version=0, remaining=9)) == ["0:a", "0:b"]


def test_in_a_window_an_older_prompt_is_waited_for_until_it_arrives_or_is_given_up() -> None:
    holders, consumed = Holders(), set[str]()
    window = ReorderWindow(1, ["0:a", "0:b", "0:c", "0:d"], is_settled=consumed.__contains__)
    source, _, dropped = source_of(holders, consumed=consumed, window=window)
    holders.arrivals = [sample("0:c", version="0.0"), sample("0:b", version="0.0")]
    assert asyncio.run(source.poll(version=0, remaining=4)) is None
    assert source.waiting_for() == "2 more of 2 trajectories, first of all prompt 0:a"
    holders.arrivals = [sample("0:a", dropped="filtered: the rewards of all 2 answers are 1")]
    assert asyncio.run(source.poll(version=0, remaining=4)) is None
    consumed.update(dropped)
    assert asyncio.run(source.poll(version=0, remaining=3)) == ["0:b", "0:c"]


def test_a_batch_with_a_token_that_is_too_old_is_refused_whoever_chose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    holders = Holders()
    source, _, _ = source_of(holders, consumed=set(), eta=1)
    holders.arrivals = [sample("0:a", version="0.0"), sample("0:b", version="1.1")]
    monkeypatch.setattr(ReadySamples, "take", lambda *_, **__: BatchDecision(batch=("0:b", "0:a")))
    with pytest.raises(StaleTokenError, match="sample 0:a .* at version 2: .* of version 0"):
        asyncio.run(source.poll(version=2, remaining=9))


def test_what_is_too_old_goes_back_to_be_generated_again() -> None:
    holders = Holders()
    source, buffer, _ = source_of(holders, consumed=set(), eta=1)
    holders.arrivals = [sample("0:old", version="0.0"), sample("0:new", version="1.1")]
    assert asyncio.run(source.poll(version=2, remaining=9)) is None
    assert holders.rejected == [("0:old", "stale")]
    assert set(buffer.samples) == {"0:new"}


def test_tokens_of_a_lost_branch_are_orphans_however_fresh_their_number_is() -> None:
    holders = Holders()
    source, _, _ = source_of(holders, consumed=set(), eta=5, epoch=3, batch_size=1)
    holders.arrivals = [sample("0:orphan", version="1.3"), sample("0:living", order=1, version="1.2")]
    assert asyncio.run(source.poll(version=3, remaining=9)) == ["0:living"]
    assert holders.rejected == [("0:orphan", "stale")]


def test_only_the_rank_that_took_a_copy_in_is_told_to_refuse_it() -> None:
    holders = Holders()
    source, _, _ = source_of(holders, consumed={"0:done"})
    holders.arrivals = [
        sample("0:a", version="0.0"),
        sample("0:a", version="0.0", owner=3),
        sample("0:done", version="0.0", owner=5),
    ]
    asyncio.run(source.poll(version=0, remaining=9))
    assert holders.told == [({5: ["0:done"]}, "consumed"), ({3: ["0:a"]}, "duplicate")]


def test_who_made_anew_what_is_dropped_is_told_so() -> None:
    holders, consumed = Holders(), set[str]()
    source, _, dropped = source_of(holders, consumed=consumed)
    dropped["0:gone"] = "reward_error: boom"
    consumed |= {"0:gone", "0:done"}
    holders.arrivals = [sample("0:gone", version="0.0", owner=2), sample("0:done", version="0.0", owner=5)]
    asyncio.run(source.poll(version=0, remaining=9))
    assert holders.told == [({5: ["0:done"]}, "consumed"), ({2: ["0:gone"]}, "dropped")]


def test_a_second_copy_is_thrown_away_and_the_first_stays() -> None:
    holders = Holders()
    source, buffer, _ = source_of(holders, consumed={"0:done"})
    holders.arrivals = [sample("0:a", version="0.0"), sample("0:a", version="0.0"), sample("0:done", version="0.0")]
    asyncio.run(source.poll(version=0, remaining=9))
    assert sorted(holders.rejected) == [("0:a", "duplicate"), ("0:done", "consumed")]
    assert set(buffer.samples) == {"0:a"} and buffer.duplicates == 2


def test_given_up_samples_are_counted_and_make_the_last_batch_smaller() -> None:
    holders = Holders()
    source, buffer, dropped = source_of(holders, consumed=set(), batch_size=2)
    holders.arrivals = [sample("0:a", version="0.0"), sample("0:b", dropped="reward_error: boom")]
    assert asyncio.run(source.poll(version=0, remaining=2)) == ["0:a"]
    assert dropped == {"0:b": "reward_error: boom"} and "0:b" not in buffer.samples
    assert holders.cleared == ["0:b"]  # who received it need not remember it any more


def test_a_sample_without_what_the_calls_read_is_an_error_that_names_both() -> None:
    holders = Holders()
    source, _, _ = source_of(holders, consumed=set())
    holders.arrivals = [replace(sample("0:a", version="0.0"), keys=frozenset({"rewards"}))]
    with pytest.raises(ValueError, match="sample 0:a came without input_ids.*it has rewards"):
        asyncio.run(source.poll(version=0, remaining=9))


def test_rows_are_loaded_in_order_without_those_that_are_consumed() -> None:
    holders = Holders()
    buffer = SequenceBuffer(is_consumed={"0:b"}.__contains__)
    source = DatasetSource(iter(["0:a", "0:b", "0:c", "0:d"]), buffer, holders, batch_size=2, on_drop=unexpected)
    assert asyncio.run(source.poll(version=0, remaining=3)) == ["0:a", "0:c"]
    assert asyncio.run(source.poll(version=1, remaining=1)) == ["0:d"]


def test_rows_that_were_given_back_come_again_after_all_others() -> None:
    holders = Holders()
    buffer = SequenceBuffer(is_consumed=lambda uid: False)
    source = DatasetSource(iter(["0:a", "0:b", "0:c"]), buffer, holders, batch_size=2, on_drop=unexpected)
    assert asyncio.run(source.poll(version=0, remaining=3)) == ["0:a", "0:b"]
    asyncio.run(source.give_back(["0:a", "0:b"]))
    assert not buffer.samples and holders.cleared == ["0:a", "0:b"] and holders.rejected == []
    assert asyncio.run(source.poll(version=0, remaining=3)) == ["0:c", "0:a"]
    assert asyncio.run(source.poll(version=1, remaining=1)) == ["0:b"]


def test_prompts_that_were_given_back_are_to_have_other_answers() -> None:
    buffer = SequenceBuffer(is_consumed=lambda uid: False)
    prompts = iter(["0:a", "0:b"])
    source = DatasetSource(prompts, buffer, Holders(), batch_size=1, on_drop=unexpected, next_order=0)
    assert asyncio.run(source.poll(version=0, remaining=2)) == ["0:a"]
    asyncio.run(source.give_back(["0:a"]))
    assert asyncio.run(source.poll(version=0, remaining=2)) == ["0:b"]
    assert asyncio.run(source.poll(version=1, remaining=1)) == ["0:a"]
    assert {uid: (held.order, held.tries) for uid, held in buffer.samples.items()} == {"0:b": (1, 0), "0:a": (2, 1)}


def test_trajectories_that_were_given_back_are_answered_anew() -> None:
    holders = Holders()
    source, buffer, _ = source_of(holders, consumed=set(), batch_size=1)
    holders.arrivals = [sample("0:a", version="0.0")]
    assert asyncio.run(source.poll(version=0, remaining=9)) == ["0:a"]
    asyncio.run(source.give_back(["0:a"]))
    assert holders.rejected == [("0:a", "not_finite")] and not buffer.samples


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), max_size=30), st.integers(0, 2))
def test_no_batch_holds_a_sample_twice_or_one_older_than_eta(arrivals: list[tuple[int, int]], eta: int) -> None:
    holders = Holders()
    consumed: set[str] = set()
    source, buffer, _ = source_of(holders, consumed=consumed, eta=eta)
    version = 0
    for number, head in arrivals:
        holders.arrivals = [sample(f"0:{number}", order=number, version=f"{min(head, 1)}.{min(head, version)}")]
        head_by_uid = {uid: held.head_version for uid, held in buffer.samples.items()}
        head_by_uid |= {held.uid: held.head_version for held in holders.arrivals if held.uid not in head_by_uid}
        batch = asyncio.run(source.poll(version=version, remaining=100))
        if batch is not None:
            assert len(set(batch)) == len(batch) == 2 and not consumed & set(batch)
            assert all(version - head_by_uid[uid] <= eta for uid in batch)
            consumed.update(batch)
            buffer.release(batch)
            version += 1


def test_drops_are_counted_by_the_kind_of_their_reason_and_by_source() -> None:
    reasons = {f"0:{row}": f"filtered: the rewards of {row}" for row in ("math/1", "math/2", "code/1")}
    reasons["1:code/2"] = "bad_row: it has no prompt"
    written = dict[str, str]()
    of_several, of_one = Drops(written.__setitem__, ("math", "code")), Drops(written.__setitem__)
    for uid, reason in reasons.items():
        of_several(uid, reason)
        of_one(uid, reason)
    of_kinds = {"data/dropped/filtered": 3, "data/dropped/bad_row": 1}
    of_sources = {"filtered/source/math": 2, "filtered/source/code": 1, "bad_row/source/code": 1}
    expected = {**of_kinds, **{f"data/dropped/{name}": number for name, number in of_sources.items()}}
    assert (of_several.counts, of_one.counts) == (expected, of_kinds) and written == reasons


# --- the buffer -----------------------------------------------------------------------------------------------------


def row(uid: str, *, order: int, owner: int = 0) -> BufferedSample:
    return BufferedSample(
        uid=uid, order=order, owner=owner, num_tokens=[4], versions=frozenset(), keys=frozenset({"input_ids"})
    )


def places(buffer: SequenceBuffer) -> dict[str, RanksByKey]:
    return {uid: sample.ranks_by_key for uid, sample in buffer.samples.items()}


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
