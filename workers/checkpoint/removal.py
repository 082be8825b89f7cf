"""Remover: removes files that nothing needs any more, and never fails.

    weights/v00000007-e1 --rename--> weights/.removing-v00000007-e1 --files, as far as they go--> gone
                                            └── what stays is tried again with the next removal beside it

Removing only gives room back, so nothing that refuses to go may end anything: a file that is immutable, one that NFS
keeps for a reader (`.nfs...`), a folder that somebody fills meanwhile. The name aside is what others rely on: no folder
is seen half-empty under a name that means something.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from corral.experiments.trial.directory import remove_tree

logger = logging.getLogger(__name__)

_REMOVING: Final = ".removing-"


class Remover:
    """Belongs to one thread.

    Example:
        remover.remove(weights_path / "v00000007-e1")
        remover.sweep(weights_path)     # what earlier removals have left there
    """

    def __init__(self) -> None:
        self._reported: set[Path] = set()

    def remove(self, path: Path) -> bool:
        """Whether the name is free now; what stays behind it is found by `sweep`."""
        aside = path.with_name(f"{_REMOVING}{path.name}")
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            return True
        except OSError as error:
            self._tell(path, error)
            return False
        self._take_away(aside)
        return True

    def sweep(self, folder: Path) -> None:
        """Try once more to take away what was put aside in a folder."""
        for path in folder.glob(f"{_REMOVING}*"):
            self._take_away(path)

    def remove_old(self, folder: Path, *, is_old: Callable[[Path], bool]) -> list[str]:
        """Sweep a folder, and remove what is old there; the names that are free now."""
        self.sweep(folder)
        return [path.name for path in sorted(folder.iterdir()) if is_old(path) and self.remove(path)]

    def _take_away(self, path: Path) -> None:
        if (failure := remove_tree(path)) is not None:
            self._tell(path, failure)

    def _tell(self, path: Path, error: BaseException) -> None:
        """Once: it is tried again with every step."""
        if path not in self._reported:
            self._reported.add(path)
            logger.warning("%s cannot be removed and takes room until it can be: %s", path, error)
