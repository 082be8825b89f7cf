"""The compact table of uids is a dict, as far as anybody can see, but for its size."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from corral.workers.checkpoint.ledger import Ledger, UidTable

UIDS = st.sampled_from(["0:a", "0:b", "1:a", "1:b:c", "1:", "a", ":a", "10:a"])


@given(st.lists(st.tuples(UIDS, st.integers(0, 2**31 - 1))))
def test_the_table_holds_what_a_dict_would(changes: list[tuple[str, int]]) -> None:
    table, model = UidTable(), dict[str, int]()
    for uid, value in changes:
        table[uid] = model[uid] = value
    assert table == model and model == table
    assert (len(table), sorted(table)) == (len(model), sorted(model))
    assert all((uid in table) == (uid in model) for uid in ["0:a", "1:a", "2:a", "0:z", "a"])


def test_a_further_pass_over_the_data_costs_the_ledger_a_few_bytes_per_sample() -> None:
    rows, ledger = 4_000, Ledger()

    def train_pass(number: int) -> None:
        for step in range(rows // 100):
            uids = [f"{number}:problem-{row}" for row in range(100 * step, 100 * step + 100)]
            ledger.train(number * rows // 100 + step + 1, uids)
            ledger.mark_committed(ledger.delta_for(epoch=1, step=step))

    train_pass(0)
    tracemalloc.start()
    try:
        train_pass(1)
        train_pass(2)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert ledger.trained_count == 3 * rows and ledger.consumed("2:problem-3999")
    assert held < 16 * 2 * rows
