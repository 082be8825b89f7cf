"""The audit of a trial: what was consumed, against what was issued."""

from corral.workers.checkpoint.ledger import Ledger, LedgerDelta, numbers_of
from corral.workers.master.audit import audit, skipped_draws

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


def test_with_a_sampler_a_draw_is_skipped_that_nobody_has_though_a_later_one_of_the_row_was_consumed() -> None:
    deltas = [delta(1, ["0:a", "1:a"], ("2:b",)), delta(2, ["3:c"])]
    ledger = ledger_of(deltas)
    assert sorted(skipped_draws(ledger, "abcd", {"0:b", "1:c", "2:a"})) == ["0:c", "1:b", "2:c"]
    assert list(skipped_draws(ledger_of(deltas[:1]), "abcd", {"0:b", "1:b"})) == []
