"""Files that a user names, opened only if they are files: a pipe without a writer waits for ever."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path) -> BufferedReader:
    """Opens a file for reading.

    Raises:
        OSError: if it cannot be read, or is a pipe, a device or a socket.
    """
    # Opening a pipe without a writer would block already.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "Is a pipe or a device, not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path) -> bytes:
    """The whole of a file that `open_regular` opens."""
    with open_regular(path) as stream:
        return stream.read()
