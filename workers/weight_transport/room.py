"""How much may still be written into a directory of a host's memory before somebody is killed for it.

statvfs of the directory ─┐
MemAvailable of the host ─┼─ the least ──► bytes      the last two only where the directory is memory
memory of the cgroups ────┘
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_CGROUPS: Final = Path("/sys/fs/cgroup")
_MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs"})


def room_in(directory: Path) -> int:
    """Bytes; a file system of memory gives what nobody else has, and SLURM's limits for the job's memory hold, too."""
    space = os.statvfs(directory)
    free = space.f_bavail * space.f_frsize
    if not _is_memory(directory):
        return free
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(memory["MemAvailable"].split()[0]) * 1024
    return max(0, min(free, available, *_room_of_cgroups()))


def _is_memory(directory: Path) -> bool:
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == number:
            return kind.split()[0] in _MEMORY_FILE_SYSTEMS
    return False


def _room_of_cgroups(cgroups: Path = _CGROUPS) -> Iterator[int]:
    """What each group of this process's memory may still grow by, in cgroup version 2; version 1 is not looked at."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            group = cgroups / line.removeprefix("0::/")
            for folder in (group, *group.parents):
                limit = _number_in(folder / "memory.max")
                used = _number_in(folder / "memory.current")
                if limit is not None and used is not None:
                    yield limit - used + _reclaimable(folder)
                if folder == cgroups:
                    break


def _number_in(path: Path) -> int | None:
    """None for `max`, and where there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(folder: Path) -> int:
    """Bytes of files that the kernel holds only as long as nobody wants their place."""
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    return max(0, int(stat.get("file", 0)) - int(stat.get("shmem", 0)))
