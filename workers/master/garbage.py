"""How often the master's garbage is collected: by the amount that a step makes, not by that of a message.

A step makes some hundred thousand objects that live until its end: metadata, shares, replies. With Python's usual
thresholds they, and every module that is loaded, are searched for cycles many times a step, which is a third of what
the master computes (benchmarks/control_plane.py). Cycles are rare here: they come with exceptions.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (500_000, 20, 20)  # objects, more than a step keeps; younger collections before an older one is looked at


@contextmanager
def rare_collections() -> Iterator[None]:
    """For as long as the block runs: what is here already is not searched, what comes is searched seldom."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
