"""The model worker's store: keys accumulate per sample, and memory is counted and given back."""

import numpy as np
import pytest

from corral.scheduling.keys import BUILT_IN_KEYS
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.model.data_store import DataStore


def make_sample(uid: str, lengths: list[int]) -> SequenceSample:
    ids = [np.arange(n) + 100 * n for n in lengths]
    return SequenceSample.from_group(uid, {"input_ids": ids, "rewards": [float(n) for n in lengths]})


def test_samples_come_back_in_the_order_asked_for() -> None:
    store = DataStore()
    store.put(SequenceSample.gather([make_sample("0:a", [2, 3]), make_sample("0:b", [4])]))
    store.put(make_sample("0:c", [1]))
    gathered = store.gather(["0:c", "0:a"], ["rewards"])
    assert gathered.uids == ["0:c", "0:a"]
    assert np.asarray(gathered.data["rewards"]).tolist() == [1.0, 2.0, 3.0]
    assert store.uids == ["0:a", "0:b", "0:c"]


def test_keys_of_a_sample_accumulate() -> None:
    store = DataStore()
    sample = SequenceSample.gather([make_sample("0:a", [2, 3]), make_sample("0:b", [4])])
    store.put(sample)
    store.put(sample.with_key("proximal_logprobs", np.arange(6, dtype=np.float32)).select_keys(["proximal_logprobs"]))
    assert {key for key in BUILT_IN_KEYS if store.holds("0:a", key)} == {"input_ids", "rewards", "proximal_logprobs"}
    assert not store.holds("0:z", "rewards")
    assert np.asarray(store.gather(["0:b"], ["proximal_logprobs"]).data["proximal_logprobs"]).tolist() == [
        3.0,
        4.0,
        5.0,
    ]
    assert store.uids == ["0:a", "0:b"]


def test_a_sample_that_is_delivered_twice_is_one_and_may_be_dropped_twice() -> None:
    store = DataStore()
    sample = SequenceSample.gather([make_sample("0:a", [2, 3]), make_sample("0:b", [4])])
    for _ in range(2):
        store.put(sample)
        assert store.uids == ["0:a", "0:b"]
    for _ in range(2):
        store.drop(["0:a", "0:unknown"])
        assert store.uids == ["0:b"] and "0:a" not in store


def test_a_stored_sample_does_not_hold_on_to_the_batch_it_came_in() -> None:
    store = DataStore()
    store.put(SequenceSample.gather([make_sample("0:a", [2]), make_sample("0:b", [1000])]))
    assert store.gather(["0:a"], ["input_ids"]).data["input_ids"].base is None


def test_what_is_missing_is_named() -> None:
    store = DataStore()
    store.put(make_sample("0:a", [2]))
    with pytest.raises(ValueError, match=r"2 of 4 values are not in this store, first \('0:b', 'input_ids'\)"):
        store.gather(["0:a", "0:b"], ["input_ids", "rewards"])
