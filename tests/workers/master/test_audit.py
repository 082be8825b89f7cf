"""The audit of a trial: what was consumed, against what was issued."""

from corral.workers.checkpoint.ledger import Ledger, LedgerDelta, numbers_of
from corral.workers.master.audit import audit

ISSUED = ["0:a", "0:b", "0:c", "0:d"]


def delta(step: int, trained: list[str], dropped: tuple[str, ...] = ()) -> LedgerDelta:
    return LedgerDelta(epoch=1, step=step, trained={step: trained}, dropped=dict.fromkeys(dropped, "bad_row"))


def ledger_of(deltas: list[LedgerDelta]) -> Ledger:
    ledger = Ledger(numbers_of("abcd"))
    for one in deltas:
        ledger.add(one)
    return ledger


def test_a_trial_that_was_taken_up_again_has_skipped_and_repeated_nothing() -> None:
    deltas = [delta(1, ["0:a"], ("0:b",)), delta(2, ["0:c"])]
    found = audit(ledger_of(deltas), deltas, ISSUED)
    assert found.render() == "2 prompts trained, 1 dropped, in the order of the seed: skipped 0, repeated 0"


def test_what_is_lost_or_comes_twice_is_named() -> None:
    deltas = [delta(1, ["0:a", "0:d"]), delta(2, ["0:c"])]
    found = audit(ledger_of(deltas), [*deltas, delta(3, ["0:a"])], ISSUED)
    assert (found.skipped, found.repeated, found.is_in_order) == (("0:b",), ("0:a",), False)
