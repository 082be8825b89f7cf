"""Work on the files of a version, several at a time where that pays.

files ──► many bytes: threads, some at a time
      └─► few bytes: the caller's own, one after the other
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from corral.workers.checkpoint.durable_file import FileEntry

T = TypeVar("T")

_THREADS: Final = 4  # hashing and copying release the interpreter lock; more threads saturate the file system instead
_LARGE_BYTES: Final = 2**20  # takes longer to read and hash than a thread to begin


def for_each_file(work: Callable[[str], T], files: Mapping[str, FileEntry]) -> dict[str, T]:
    """What `work` gives for each name, in the order of `files`; raises what the first of them raises.

    A thread takes longer to begin, on a host that computes, than a small file to read; and of several threads none is
    needed where one file is all that is large.
    """
    num_large = sum(entry.size > _LARGE_BYTES for entry in files.values())
    if num_large < 2:
        return {name: work(name) for name in files}
    with ThreadPoolExecutor(min(_THREADS, num_large)) as pool:
        return dict(zip(files, pool.map(work, files), strict=True))
