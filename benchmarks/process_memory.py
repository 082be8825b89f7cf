"""What the kernel counts of this process's memory, and of the machine's.

forget_peak ──► kernel_count("VmRSS") ──► what is measured ──► kernel_count("VmHWM"): the most that was held meanwhile
"""

from pathlib import Path


def forget_peak() -> None:
    """Have the kernel count the largest memory of this process from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def kernel_count(name: str) -> int:
    """VmRSS, RssAnon or VmHWM of this process, in bytes."""
    return _bytes_after(name, Path("/proc/self/status"))


def free_bytes() -> int:
    """What the machine could give without swapping."""
    return _bytes_after("MemAvailable", Path("/proc/meminfo"))


def _bytes_after(name: str, path: Path) -> int:
    """Of a line such as `VmRSS:  1234 kB`."""
    line = next(line for line in path.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
