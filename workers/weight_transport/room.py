"""How much may still be written into a directory of a host's memory before somebody is killed for it.

statvfs of the directory ─┐
MemAvailable of the host ─┼─ the least ──► bytes      the last two only where the directory is memory
memory of the cgroups ────┘
"""

import os
from pathlib import Path
from typing import Final

from corral.experiments.trial.memory_groups import memory_groups

_MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs"})


def room_in(directory: Path) -> int:
    """Bytes; a file system of memory gives what nobody else has, and SLURM's limits for the job's memory hold, too."""
    space = os.statvfs(directory)
    free = space.f_bavail * space.f_frsize
    if not _is_memory(directory):
        return free
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(memory["MemAvailable"].split()[0]) * 1024
    rooms = (group.room for group in memory_groups())
    return max(0, min(free, available, *(room for room in rooms if room is not None)))


def _is_memory(directory: Path) -> bool:
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == number:
            return kind.split()[0] in _MEMORY_FILE_SYSTEMS
    return False
