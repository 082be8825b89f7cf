"""Garbage is collected seldom while the master works; what it began with is never searched, and cycles do not stay."""

import gc
import weakref

from corral.workers.master.master_worker import rare_collections


class Cycle:
    """Refers to itself: only the collector can free it."""

    def __init__(self) -> None:
        self.me = self


def test_what_is_here_is_left_alone_and_what_comes_is_collected_later() -> None:
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_freeze_count() > 0
        gone = weakref.ref(Cycle())
        kept = [[number] for number in range(2 * before[0])]
        assert gone() is not None and len(kept) == 2 * before[0]  # usually it would be gone by now
        kept += [[number] for number in range(2 * gc.get_threshold()[0])]
        assert gone() is None
    assert gc.get_threshold() == before and gc.get_freeze_count() > 0
