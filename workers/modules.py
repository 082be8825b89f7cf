"""Modules are loaded without a search for garbage among what they consist of.

    with loading_modules(): import torch      searched for nothing meanwhile; what came is left alone afterwards, too

A library like torch makes millions of objects that all stay. Python would search them again and again, which takes a
third of the time until a worker has what it needs.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading_modules() -> Iterator[None]:
    """For the imports of a process, while it does nothing else; what is garbage by then stays for good."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
