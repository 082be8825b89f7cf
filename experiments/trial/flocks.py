"""Locks of directories and files among the processes of one host; the kernel gives them back when a process dies.

shared ──► "I use this"      exclusive ──► "nobody uses this": only then is it removed
"""

import fcntl
import logging
import os
import secrets as random_tokens
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from corral.experiments.trial.directory import remove_tree

logger = logging.getLogger(__name__)

REMOVING: Final = ".corral-removing-"


def open_directory(path: Path) -> int:
    """A file descriptor that no child inherits; refuses a symbolic link."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def hold_directory(path: Path) -> int | None:
    """Say that this process uses a directory, until the descriptor is closed; None if it is gone, or about to be."""
    try:
        descriptor = open_directory(path)
    except FileNotFoundError:
        return None
    if try_lock(descriptor, fcntl.LOCK_SH) and is_at(descriptor, path):
        return descriptor
    os.close(descriptor)
    return None


def remove_if_unused(path: Path) -> bool:
    """Remove a directory of this user's, private to him, unless a process uses it; False if it stays."""
    try:
        descriptor = open_directory(path)
    except OSError:
        return False
    try:
        if not is_private(descriptor) or not try_lock(descriptor, fcntl.LOCK_EX) or not is_at(descriptor, path):
            return False
        # The next process makes a new one, and does not wait for the removal.
        doomed = path.with_name(f"{REMOVING}{random_tokens.token_hex(8)}")
        path.rename(doomed)
        if (failure := remove_tree(doomed)) is not None:  # it is found by the next one who looks
            logger.warning("%s cannot be removed and takes room until it can be: %s", doomed, failure)
    except OSError as error:
        logger.warning("%s cannot be removed and takes room until it can be: %s", path, error)
        return False
    finally:
        os.close(descriptor)
    return True


def is_private(descriptor: int) -> bool:
    """Whether a file is this user's, and nobody else may look into it: others can write into /dev/shm, too."""
    status = os.fstat(descriptor)
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the file still has this name: it may have been removed while its lock was being taken."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def try_lock(descriptor: int, operation: int) -> bool:
    """Lock without waiting; False if another process has it."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A file to lock, made if need be."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
