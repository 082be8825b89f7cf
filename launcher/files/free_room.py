"""Whether the file system of a trial has room, as its owner is told."""

import os
from pathlib import Path
from typing import Final

_FULL_BYTES: Final = 4 << 20  # what is left at times where the next write of any size fails


def why_no_room(directory: Path) -> str:
    """What is full, and the way out; empty while there is room, or where nobody can say. A quota is not seen.

    Raises:
        OSError: the directory is not there, or does not answer.
    """
    file_system = os.statvfs(directory)
    if file_system.f_bavail * file_system.f_frsize < _FULL_BYTES:
        what = f"disk of {directory} is full: {_megabytes(file_system.f_bavail, file_system.f_frsize)} MB of "
        what += f"{_megabytes(file_system.f_blocks, file_system.f_frsize)} MB are free"
    elif file_system.f_files and not file_system.f_favail:
        what = f"disk of {directory} takes no more files: none of {file_system.f_files} is free"
    else:
        return ""
    return f"the {what}; make room, and the trial goes on by itself"


def _megabytes(blocks: int, block_bytes: int) -> str:
    return f"{blocks * block_bytes / 1e6:,.1f}"
