"""Removing what nobody needs: it only gives room back, so that nothing that refuses to go ends anything.

A file may be immutable, or kept by NFS for a reader (`.nfs...`); a folder may be filled meanwhile.
"""

import contextlib
import shutil
from pathlib import Path


def remove_file(path: Path) -> None:
    """Removes a file, if it is there and goes."""
    with contextlib.suppress(OSError):
        path.unlink()


def remove_tree(path: Path) -> BaseException | None:
    """Removes a folder as far as it goes; why some of it stays."""
    failures: list[BaseException] = []
    shutil.rmtree(path, onerror=lambda _function, _path, info: failures.append(info[1]))
    return failures[0] if failures else None
