"""Files of a trial, for commands that a person waits for: a mount that hangs costs a message, never the terminal.

command --PatientFiles.run--> FileThread: one piece of work with files --> its result
                                 +-- silent for too long --> TimeoutError that names the path

A file is read in pieces, each with that deadline: a long log may take its time, a silent one not.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from corral.launcher.files.file_thread import FileThread

T = TypeVar("T")

_PATIENCE_S = 10.0  # all exit records of a trial that restarted often take a loaded file server a second or two


class PatientFiles:
    """Works with files in a thread of its own; once that hangs, nobody waits for it again."""

    def __init__(self) -> None:
        self._thread = FileThread("patient-files")

    def run(self, work: Callable[[], T], path: Path) -> T:
        """What the work returns, or raises.

        Args:
            work: one bounded piece; it asks nobody but the file system.
            path: what it is about, for the error's text.

        Raises:
            TimeoutError: if the file system does not answer.
        """
        future = self._thread.submit(work)
        if not self._thread.wait_for(future, _PATIENCE_S):
            raise TimeoutError(
                f"{path} does not answer: nothing came back within {_PATIENCE_S:g} s; is its file system there? "
                f"Try again once ls answers there; on SLURM, scancel ends a job without a checkpoint"
            )
        return future.result()

    def size(self, path: Path) -> int:
        """Bytes of a file; raises as `run`."""
        return self.run(partial(_size, path), path)

    def read(self, path: Path, start: int, num_bytes: int) -> bytes:
        """What a file has from a place on, at most so much; raises as `run`."""
        return self.run(partial(_read, path, start, num_bytes), path)


# Opened anew each time: over NFS that is what makes another node's writes visible.


def _size(path: Path) -> int:
    with path.open("rb") as file:
        return file.seek(0, os.SEEK_END)


def _read(path: Path, start: int, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(num_bytes)
