"""The control groups that this process's memory is counted in, of cgroup version 1 or 2, as SLURM and containers make.

/proc/self/cgroup + /proc/self/mountinfo --memory_groups--> folders, the process's own first
    room     what may still be used before the kernel kills somebody for it
    kills    how many the kernel has killed for it
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

_PROC: Final = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """One control group that limits or counts memory."""

    folder: Path
    is_v2: bool

    @property
    def room(self) -> int | None:
        """Bytes; what the kernel holds only as long as nobody wants its place counts as free. None without a limit."""
        limit = self._number("memory.max" if self.is_v2 else "memory.limit_in_bytes")
        used = self._number("memory.current" if self.is_v2 else "memory.usage_in_bytes")
        if limit is None or used is None:
            return None
        stat = self._table("memory.stat")
        files, shared = ("file", "shmem") if self.is_v2 else ("total_cache", "total_shmem")
        return limit - used + max(0, stat.get(files, 0) - stat.get(shared, 0))

    @property
    def kills(self) -> int | None:
        """Processes that were killed for a limit, since the group was made; None if the kernel does not say."""
        return self._table("memory.events" if self.is_v2 else "memory.oom_control").get("oom_kill")

    @property
    def members(self) -> set[int]:
        """Ids of the processes that are counted in it, without those of groups inside it."""
        return {int(line) for line in self._text("cgroup.procs").split()}

    def _number(self, name: str) -> int | None:
        """None for `max`, and where there is no such file."""
        text = self._text(name).strip()
        return int(text) if text.isdecimal() else None

    def _table(self, name: str) -> dict[str, int]:
        rows = (line.split() for line in self._text(name).splitlines())
        return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}

    def _text(self, name: str) -> str:
        try:
            return (self.folder / name).read_text()
        except OSError:
            return ""


def memory_groups(proc: Path = _PROC) -> Iterator[MemoryGroup]:
    """The group of this process, then those around it; none where the kernel has no groups, or they are not mounted."""
    try:
        paths = dict(_hierarchy_and_path(line) for line in (proc / "cgroup").read_text().splitlines())
        mounts = (proc / "mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in mounts:
        mount, _, what = line.partition(" - ")
        (_, _, _, root, point), (kind, _, options) = mount.split()[:5], what.split()[:3]
        is_v2 = kind == "cgroup2"
        path = paths.get("" if is_v2 else "memory")
        if path is None or not (is_v2 or (kind == "cgroup" and "memory" in options.split(","))):
            continue
        try:
            # A container sees a part of the tree, from `root` on.
            own = Path(point) / PurePosixPath(path).relative_to(root)
        except ValueError:
            continue
        around = (folder for folder in (own, *own.parents) if folder.is_relative_to(point))
        yield from (MemoryGroup(folder, is_v2) for folder in around)


def _hierarchy_and_path(line: str) -> tuple[str, str]:
    """`4:memory:/job_7` -> memory, `0::/job_7` -> "": version 2 has one tree for everything."""
    _, controllers, path = line.split(":", 2)
    return ("memory" if "memory" in controllers.split(",") else controllers), path
