"""What the processes of a sandbox hold together, seen from outside: the proc file system of its own lists just them."""

import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of all processes of a sandbox."""

    processes: int
    memory_bytes: int
    """Resident; what several share counts once where it matters."""


def look(init: int, *, memory_limit_bytes: int) -> Usage:
    """What a sandbox uses now; nothing before it has begun, and once it is over.

    Args:
        init: process 1 of the sandbox, by its number outside.
        memory_limit_bytes: below it, an upper bound of the memory is enough.
    """
    # A sandbox cannot mount anything there: it has no capabilities, and its root is read-only.
    proc = f"/proc/{init}/root/proc"
    try:
        if os.stat(proc).st_dev == os.stat("/proc").st_dev:
            return Usage(processes=0, memory_bytes=0)  # it is being made, and still sees this one
        numbers = [name for name in os.listdir(proc) if name.isdecimal()]
    except OSError:
        return Usage(processes=0, memory_bytes=0)
    resident = sum(_resident_bytes(content) for content in _read(proc, numbers, "statm"))
    if resident > memory_limit_bytes:  # each page counts in every process that has it, as after a fork
        resident = sum(_shared_out_bytes(content) for content in _read(proc, numbers, "smaps_rollup"))
    return Usage(processes=len(numbers), memory_bytes=resident)


def _read(proc: str, numbers: list[str], name: str) -> Iterator[bytes]:
    """The file of each process that is still there."""
    for number in numbers:
        try:
            with open(f"{proc}/{number}/{name}", "rb") as file:
                yield file.read()
        except OSError:
            continue


def _resident_bytes(statm: bytes) -> int:
    return int(statm.split()[1]) * mmap.PAGESIZE


def _shared_out_bytes(rollup: bytes) -> int:
    """Each page divided by how many processes have it."""
    found = _PSS.search(rollup)
    return int(found[1]) * 1024 if found else 0
