"""The order of prompts: each row once a pass, sources in their shares, and the same again after any interruption."""

from collections import Counter
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from corral.workers.checkpoint.ledger import Ledger, numbers_of
from corral.workers.data.prompts import split_uid, turns_of, uids_of_passes

SIZES = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 7), min_size=1)


def rows_of(sizes: dict[str, int]) -> list[str]:
    return [f"{name}/{number}" for name, size in sizes.items() for number in range(size)]


@given(SIZES, st.integers(1, 3), st.integers(0, 9))
@settings(deadline=None)
def test_without_weights_each_pass_has_each_row_of_each_source_once(
    sizes: dict[str, int], epochs: int, seed: int
) -> None:
    rows = rows_of(sizes)
    uids = list(uids_of_passes(rows, seed=seed, num_epochs=epochs, shuffle=True, weights=dict.fromkeys(sizes)))
    for epoch in range(epochs):
        assert sorted(uids[epoch * len(rows) : (epoch + 1) * len(rows)]) == sorted(f"{epoch}:{row}" for row in rows)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 200))
def test_at_no_time_has_anybody_a_whole_turn_more_than_its_share(shares: list[int], num: int) -> None:
    taken = Counter(islice(turns_of(shares), num))
    assert all(taken[at] < share * num / sum(shares) + 1 for at, share in enumerate(shares))
    whole = Counter(islice(turns_of(shares), sum(shares)))
    assert [whole[at] for at in range(len(shares))] == shares


@given(SIZES, st.lists(st.sampled_from([0.1, 0.3, 1.0, 2.5]), min_size=4, max_size=4), st.data())
@settings(deadline=None)
def test_what_comes_after_an_interruption_is_what_would_have_come(
    sizes: dict[str, int], weights: list[float], data: st.DataObject
) -> None:
    rows, by_source = rows_of(sizes), dict(zip(sizes, weights, strict=False))
    order = list(uids_of_passes(rows, seed=1, num_epochs=3, shuffle=True, weights=by_source))
    assert len(set(order)) == len(order) == 3 * len(rows)
    kept = data.draw(st.integers(0, len(order)))
    ledger = Ledger(numbers_of(rows))
    ledger.train(1, order[:kept])
    resumed = Ledger(numbers_of(rows), ledger.states())
    again = uids_of_passes(rows, seed=1, num_epochs=3, shuffle=True, weights=by_source)
    assert [uid for uid in again if not resumed.consumed(uid)] == order[kept:]


@given(SIZES, st.lists(st.integers(-2, 2), min_size=28, max_size=28), st.integers(0, 9), st.booleans())
@settings(deadline=None)
def test_with_an_order_each_pass_of_a_source_rises_and_the_seed_decides_among_equals(
    sizes: dict[str, int], numbers: list[int], seed: int, shuffle: bool
) -> None:
    rows = rows_of(sizes)
    value = dict(zip(rows, numbers, strict=False))
    values = {name: [value[f"{name}/{at}"] for at in range(size)] for name, size in sizes.items() if name != "d"}
    by_source: dict[str, float | None] = dict.fromkeys(sizes)
    plain, ordered = (
        list(uids_of_passes(rows, seed=seed, num_epochs=2, shuffle=shuffle, weights=by_source, values=given))
        for given in ({}, values)
    )

    def key(uid: str) -> tuple[int, float]:
        dataset_epoch, row = split_uid(uid)
        return dataset_epoch, 0.0 if row.startswith("d") else value[row]

    for name in sizes:
        own, before = ([uid for uid in uids if split_uid(uid)[1].startswith(name)] for uids in (ordered, plain))
        assert own == sorted(before, key=key)
