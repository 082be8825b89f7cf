"""Files of a trial, for commands that a person waits for: a mount that hangs costs a message, never the terminal.

command --run--> one piece of work with files, in a thread --> its result
                    +-- silent for too long --> TimeoutError that names the path, and says what to do

A file is read in pieces, each with that deadline: a long log may take its time, a silent one not.
"""

import os
from functools import partial
from pathlib import Path

from corral.launcher.files.file_thread import FileThread

_PATIENCE_S = 10.0  # all exit records of a trial that restarted often take a loaded file server a second or two
_ADVICE = " Try again once ls answers there; on SLURM, scancel ends a job without a checkpoint"


class PatientFiles(FileThread):
    """A thread of a command's own; once that hangs, nobody waits for it again."""

    def __init__(self) -> None:
        super().__init__("patient-files", patience_s=_PATIENCE_S, advice=_ADVICE)

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
