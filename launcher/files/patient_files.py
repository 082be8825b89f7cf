"""Files of a trial, for commands that a person waits for: a mount that hangs costs a message, never the terminal.

command --PatientFiles.run--> FileThread: one piece of work with files --> its result
                                 +-- silent for too long --> TimeoutError that names the path
path --PatientFiles.open--> a file of which each read has that deadline: a long log may take its time, a silent one not
"""

import io
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from corral.launcher.files.file_thread import FileThread

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

T = TypeVar("T")

_PATIENCE_S = 10.0  # all exit records of a trial that restarted often take a loaded file server a second or two
_BUFFER_BYTES = 1 << 16


class Files:
    """Works with files in the caller's thread, however long that takes."""

    def run(self, work: Callable[[], T], path: Path) -> T:
        """What the work returns, or raises."""
        return work()

    def open(self, path: Path) -> BinaryIO:
        """The file, to be read."""
        return path.open("rb")


DIRECT = Files()
"""For programs that nobody waits for, and for tests."""


class PatientFiles(Files):
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

    def open(self, path: Path) -> BinaryIO:
        """The file, to be read; each piece of it has the deadline of `run`."""
        descriptor = self.run(partial(os.open, path, os.O_RDONLY | os.O_CLOEXEC), path)
        return io.BufferedReader(_PatientFile(self, descriptor, path), _BUFFER_BYTES)

    def forget(self, work: Callable[[], None]) -> None:
        """Has it done some time, and waits for nothing."""
        self._thread.submit(work)


class _PatientFile(io.RawIOBase):
    """A file that is open; every call of the system is made in the thread."""

    def __init__(self, files: PatientFiles, descriptor: int, path: Path) -> None:
        self._files = files
        self._descriptor = descriptor
        self._path = path

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._files.run(partial(os.lseek, self._descriptor, offset, whence), self._path)

    def readinto(self, buffer: "WriteableBuffer") -> int:
        # Not into the buffer itself, which is gone when a thread that hung comes back.
        view = memoryview(buffer).cast("B")
        data = self._files.run(partial(os.read, self._descriptor, len(view)), self._path)
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._files.forget(partial(os.close, self._descriptor))
