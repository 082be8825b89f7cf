"""A data set of three parts, and what of it a ledger holds."""

from corral.workers.checkpoint.ledger import DROPPED, TRAINED, Ledger, numbers_of

ROWS = numbers_of(["a", "b", "c", "d", "e", "x", "b:c", "", *map(str, range(2500))])


def trained(ledger: Ledger) -> set[str]:
    return set(ledger.beyond(Ledger(ROWS), TRAINED))


def dropped(ledger: Ledger) -> set[str]:
    return set(ledger.beyond(Ledger(ROWS), DROPPED))
