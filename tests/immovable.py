"""Files that refuse to go, as on file systems with immutable files or readers elsewhere."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def immovable(*files: Path) -> Iterator[None]:
    """Nothing and nobody, root included, can remove these files meanwhile; their folders can be renamed."""
    folders = [file.parent for file in files]
    is_root = os.geteuid() == 0  # whom the mode of a folder does not stop
    if is_root:
        subprocess.run(["chattr", "+i", *files], check=True)
    else:
        for folder in folders:
            folder.chmod(0o555)
    try:
        yield
    finally:
        if is_root:
            places = [found for file in files for found in (file, *file.parent.parent.glob(f"*/{file.name}"))]
            subprocess.run(["chattr", "-i", *(place for place in places if place.exists())], check=True)
        else:
            for folder in folders:
                for found in folder.parent.iterdir():
                    if found.is_dir():
                        found.chmod(0o755)
