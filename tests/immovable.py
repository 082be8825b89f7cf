"""Files that refuse to go, as on file systems with immutable files or readers elsewhere."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def immovable(*files: Path) -> Iterator[None]:
    """Nothing and nobody, root included, can remove these files meanwhile; their folders can be renamed."""
    is_root = os.geteuid() == 0  # whom the mode of a folder does not stop
    with ExitStack() as stack:
        opened = [os.open(file if is_root else file.parent, os.O_RDONLY) for file in files]
        for descriptor in opened:
            stack.callback(os.close, descriptor)
            stack.callback(_set, descriptor, is_root=is_root, is_immovable=False)
            _set(descriptor, is_root=is_root, is_immovable=True)
        yield


def _set(descriptor: int, *, is_root: bool, is_immovable: bool) -> None:
    if is_root:  # wherever it has been moved to
        subprocess.run(
            ["chattr", "+i" if is_immovable else "-i", os.readlink(f"/proc/self/fd/{descriptor}")], check=True
        )
    else:
        os.fchmod(descriptor, 0o555 if is_immovable else 0o755)
